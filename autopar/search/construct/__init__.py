"""A solution of one configuration: cuts and candidates (``drafts``), chosen within memory (``refine``), improved (``local``)."""
