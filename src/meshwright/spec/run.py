"""`RunSpec`: everything about a run in one frozen object, which the rest of the package reads."""

from __future__ import annotations

import hashlib
import json
from math import ceil
from typing import Any

from pydantic import ValidationInfo, model_validator

from meshwright.spec import rules
from meshwright.spec.lora_targets import decoder_targets
from meshwright.spec.sections import Sections
from meshwright.spec.weights import given_weights, own_tokenizer, weights_folder


class RunSpec(Sections):
    """Model + data + training + layout + precision + recompute + checkpoint + recovery.

    Validated once, by its parts' types and by `rules.check`, which raises `UserError`.
    """

    @model_validator(mode="before")
    @classmethod
    def _default_policy(cls, given: Any) -> Any:
        """`[recompute]` without a policy means what its keys say: `save` is selective, nothing is none."""
        if isinstance(given, dict) and isinstance(given.get("recompute"), dict):
            recompute = given["recompute"]
            if "policy" not in recompute:
                policy = "selective" if "save" in recompute else "none"
                given = {**given, "recompute": {**recompute, "policy": policy}}
        return given

    @model_validator(mode="before")
    @classmethod
    def _default_tokenizer(cls, given: Any) -> Any:
        """Without a `data.tokenizer`, weights that a run starts from bring their own, if they have one."""
        if not isinstance(given, dict) or not isinstance(given.get("model"), dict):
            return given
        data = given.get("data", {})
        if isinstance(data, dict) and "tokenizer" not in data:
            weights = given_weights(given["model"])
            own = own_tokenizer(weights)
            if own is None and weights_folder(weights) is not None:  # the config may be of another folder
                own = own_tokenizer(given["model"].get("hf"))
            given = {**given, "data": {**data, "tokenizer": str(own)}} if own else given
        return given

    @model_validator(mode="after")
    def _targets_of_the_decoder(self) -> RunSpec:
        """Modules of transformers among `lora.targets` become patterns of the decoder's names."""
        if self.lora is not None:
            targets = decoder_targets(self.model, self.lora.targets)
            # The object is frozen once it is validated, which it is not yet.
            self.__dict__["lora"] = self.lora.model_copy(update={"targets": targets})
        return self

    @model_validator(mode="after")
    def _rules(self, info: ValidationInfo) -> RunSpec:
        rules.check(self, (info.context or {}).get("ranks"))
        return self

    def counted(self, samples: int) -> RunSpec:
        """Return the run with the steps that its epochs are of a corpus of so many samples.

        The last step may begin one more epoch. Raises `UserError` where rules on steps do not hold.
        """
        if self.train.epochs is None:
            return self
        tokens = ceil(self.train.epochs * samples) * self.data.seq_len
        tree = self.to_json()
        tree["train"] |= {"epochs": None, "steps": self.train.steps_for(tokens)}
        return RunSpec.model_validate(tree)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON that `RunSpec.model_validate` reads back to an equal object."""
        return self.model_dump(mode="json")

    def digest(self) -> str:
        """SHA-256 of the canonical JSON: equal specs have equal digests."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()
