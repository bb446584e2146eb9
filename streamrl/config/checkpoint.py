"""Section ``actor.checkpoint``: what a checkpoint holds and what a resumed run takes from it. Names are verl's; it holds for the critic too."""

from __future__ import annotations

from typing import Literal

from streamrl.config.base import Section

Content = Literal["model", "optimizer", "extra", "hf_model"]


class CheckpointConfig(Section, frozen=True):
    """``extra``: schedule, KL coefficient and random states. ``hf_model``: also the whole model as a Hugging Face folder, actor/huggingface."""

    save_contents: tuple[Content, ...] = ("model", "optimizer", "extra")
    load_contents: tuple[Content, ...] | None = None  # None: what save_contents has, without hf_model
    async_save: bool = True  # training waits for a copy in main memory only, not for the disk; costs that memory until it is written

    def __post_init__(self) -> None:
        for key, contents in (("save_contents", self.save_contents), ("load_contents", self.loaded)):
            if "model" not in contents:
                raise ValueError(f"{key} needs model, or no run could go on from it, got {list(contents)}; add model")
        if "hf_model" in self.loaded:
            raise ValueError("load_contents names what a run goes on from, got hf_model; to start from such a folder, name it in model.path")
        if missing := [name for name in self.loaded if name not in self.save_contents]:
            raise ValueError(f"a run must be able to go on from its own checkpoints, got {missing} in load_contents but not in save_contents; save it too")

    @property
    def loaded(self) -> tuple[Content, ...]:
        """``load_contents``, with null resolved."""
        if self.load_contents is not None:
            return self.load_contents
        return tuple(name for name in self.save_contents if name != "hf_model")
