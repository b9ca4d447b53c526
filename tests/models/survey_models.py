"""The models of the survey by name, with the group that each is of."""

from __future__ import annotations

from dataclasses import dataclass

import survey_other
import survey_senses
import survey_text
import survey_written
from survey_text import Factory


@dataclass(frozen=True)
class Entry:
    group: str
    make: Factory


GROUPS: dict[str, dict[str, Factory]] = {
    "transformers, decoders": survey_text.DECODERS,
    "transformers, mixtures of experts": survey_text.MIXTURES,
    "transformers, recurrent": survey_text.RECURRENT,
    "transformers, encoders": survey_text.ENCODERS,
    "transformers, encoder and decoder": survey_text.PAIRS,
    "transformers, images": survey_senses.IMAGES,
    "transformers, sound": survey_senses.SOUNDS,
    "transformers, several senses": survey_senses.SEVERAL,
    "timm": survey_other.TIMM,
    "torchvision": survey_other.TORCHVISION,
    "diffusers": survey_other.DIFFUSERS,
    "peft": survey_other.PEFT,
    "written out": survey_written.WRITTEN,
}
MODELS: dict[str, Entry] = {name: Entry(group, make) for group, of in GROUPS.items() for name, make in of.items()}
