"""The one immutable spec of a run. It imports neither torch nor torch.distributed."""

from meshwright.spec.errors import UserError
from meshwright.spec.layout import Layout
from meshwright.spec.load import load
from meshwright.spec.model import ModelSpec
from meshwright.spec.moe_mla import MlaSpec, MoeSpec
from meshwright.spec.run import RunSpec

__all__ = ["Layout", "MlaSpec", "ModelSpec", "MoeSpec", "RunSpec", "UserError", "load"]
