"""A look at each tensor that a step computes: outputs of modules, their gradients, those of parameters."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any, Self

from torch import Tensor, nn

from meshwright.kernels.gradient_accumulation_fusion import no_sum
from meshwright.parallel.pipeline_parallel import ActionHook
from meshwright.schedule import Action, Kind
from meshwright.train.step import Trainer

Place = tuple[int, int, int, int]
"""Phase, microbatch, layer as the phase passes them, number on the rank: sorts as a step computes."""
FORWARD, BACKWARD = 1, 2


class StepTracer(ActionHook):
    """Calls `seen` for the tensors of each step within its `with` block, as they are computed.

    Gradients are those of this rank, before any sum over ranks. Inside compiled blocks nothing is seen.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._action: Action | None = None
        self._number = 0
        self._stack = ExitStack()

    def seen(self, what: str, tensor: Tensor, place: Place) -> None:
        """Called with a description of a tensor, the tensor, and its place in the order of the step."""
        raise NotImplementedError

    def layer(self, name: str) -> int:
        """0 for a module or parameter of the embedding, then the blocks from 1, then the head."""
        if name.startswith("blocks."):
            return int(name.split(".")[1]) + 1
        return 0 if name.startswith("embed") else self._trainer.spec.model.layers + 1

    def __enter__(self) -> Self:
        pipeline, decoder, states = self._trainer.pipeline, self._trainer.decoder, self._trainer.states
        watch, take, gradient_sum = pipeline.watch, pipeline.take, pipeline.store.gradient_sum
        names = {parameter: name for name, parameter in decoder.named_parameters()}

        def taken(parameter: nn.Parameter, gradient: Tensor | None) -> None:
            if gradient is not None:
                self._gradient(f"the gradient of {names[parameter]}", gradient)
            take(parameter, gradient)

        pipeline.watch, pipeline.take = self, taken
        vars(states).update(take=taken)
        pipeline.store.gradient_sum = no_sum  # each gradient is looked at before it is added
        self._stack.callback(lambda: vars(pipeline).update(watch=watch, take=take))
        self._stack.callback(lambda: vars(states).pop("take"))
        self._stack.callback(lambda: vars(pipeline.store).update(gradient_sum=gradient_sum))
        for name, module in decoder.named_modules():
            inner = name not in ("embed", "head") and not name.removeprefix("blocks.").isdecimal()
            if name not in ("", "blocks") and not (inner and self._trainer.spec.train.compile):
                handle = module.register_forward_hook(partial(self._output, name))
                self._stack.callback(handle.remove)
        return self

    def __exit__(self, *_error: object) -> None:
        self._stack.close()

    def before(self, action: Action) -> None:
        """Note which action computes the next tensors."""
        self._action = action

    def _output(self, name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
        action = self._action
        if not isinstance(output, Tensor) or action is None or action.kind is not Kind.F:
            return  # no tensor, or a forward that is recomputed in the backward
        self._see(f"the output of {name}", output.detach(), action)
        if output.requires_grad:
            output.register_hook(partial(self._gradient, f"the gradient at the output of {name}"))

    def _gradient(self, what: str, gradient: Tensor) -> None:
        assert self._action is not None
        self._see(what, gradient, self._action)

    def _see(self, what: str, tensor: Tensor, action: Action) -> None:
        layer = self.layer(what.rpartition(" ")[2])
        self._number += 1
        if action.kind is Kind.F:
            self.seen(what, tensor, (FORWARD, action.microbatch, layer, self._number))
        else:
            self.seen(what, tensor, (BACKWARD, action.microbatch, -layer, self._number))
