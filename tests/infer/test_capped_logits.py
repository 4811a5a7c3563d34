"""Capped logits wherever they are read: scores of texts, teachers' answers and packed decoders' choices."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from meshwright.distil.teacher import answers
from meshwright.infer import generate, packed_linears
from meshwright.infer.packed_linears import pack_linears
from meshwright.infer.scores import _predicted_tokens
from meshwright.model.decoder import Decoder
from meshwright.model.hooks import predict
from meshwright.spec import UserError
from meshwright.spec.distil import DistilSpec
from small_decoders import make_decoder

TOKENS = torch.randint(0, 97, (2, 20), generator=torch.Generator().manual_seed(0))


def capped_logits(decoder: Decoder) -> Tensor:
    """Logits by the head's own weight and norm, with the cap written out."""
    softcap = decoder.spec.logit_softcap
    assert softcap is not None
    kept: list[Tensor] = []
    handle = decoder.head.norm.register_forward_hook(lambda _module, _inputs, x: kept.append(x))
    decoder(TOKENS)
    handle.remove()
    logits = kept[0] @ decoder.head.weight.T
    assert float(logits.abs().max()) > softcap
    return softcap * torch.tanh(logits / softcap)


@torch.no_grad()
def test_scores_are_of_capped_logits() -> None:
    decoder = make_decoder("capped")
    log_p = capped_logits(decoder).log_softmax(-1)
    targets = TOKENS.roll(-1, 1)
    with _predicted_tokens(decoder):
        found = decoder(TOKENS, targets_BT=targets)
    torch.testing.assert_close(found[..., 0], log_p.gather(2, targets.unsqueeze(2))[..., 0])
    assert torch.equal(found[..., 1] == 1, log_p.argmax(-1) == targets)


@torch.no_grad()
def test_a_teacher_answers_by_capped_logits() -> None:
    decoder = make_decoder("capped")
    how = DistilSpec(teacher="of a test", temperature=2.0)
    kept: list[Tensor] = []
    decoder.head.norm.register_forward_hook(lambda _module, _inputs, x: kept.append(x))
    wanted = (capped_logits(decoder) / 2).log_softmax(-1)
    cap = decoder.spec.logit_softcap
    found = answers(how, predict, kept[0], decoder.head.weight, None, 1.0, None, cap)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@torch.no_grad()
def test_a_packed_decoder_caps_its_logits() -> None:
    decoder = make_decoder("capped").float()
    x = torch.randn(1, 3, decoder.spec.hidden, generator=torch.Generator().manual_seed(2))
    wanted = decoder.head(x)
    with patch.object(packed_linears, "_SMALLEST", 0):
        packed = pack_linears(decoder)
    torch.testing.assert_close(packed.head(x), wanted, rtol=1e-5, atol=1e-5)


def test_a_text_beyond_the_short_factors_is_refused() -> None:
    decoder = make_decoder("longrope")
    generate(decoder, TOKENS[:, :2], 3)
    with pytest.raises(UserError, match="LongRoPE's short factors hold; give fewer, or export"):
        generate(decoder, TOKENS, 50)
