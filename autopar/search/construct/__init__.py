"""A solution of one outer choice: cuts and candidates (``drafts``), chosen within memory (``refine``), improved (``local``)."""
