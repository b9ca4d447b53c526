"""Heuristics that construct a solution of one configuration: cuts (``drafts``), candidates within memory (of a stage: ``candidates``; of
all stages: ``refine``), and a local search (``local``)."""
