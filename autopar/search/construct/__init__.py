"""A solution of one configuration: cuts (``drafts``), candidates within memory (of a stage ``candidates``, of all ``refine``), improved
(``local``)."""
