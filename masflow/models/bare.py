"""A decoder without module overhead for models of the Llama kind: few, large operations, a prompt held once.

It proves itself against the modules before it speaks, and otherwise isn't there. Shapes: B rows, N tokens of
several prompts behind each other, D hidden, H key-value heads, V vocabulary. Knows neither text nor sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from masflow.models.backbone import Backbone
from masflow.models.bare_arena import Block, join_blocks, split_blocks
from masflow.models.bare_weights import Joint, Layer, Norm, Unknown, Voices, layer_of
from masflow.models.speaking import Opening, Prefix, Stacked

__all__ = ["BareModel", "BareSpeaker"]

FAMILIES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
STATIC_ROPES = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary positions whose angles don't depend on how long a row is."""
MAX_COPIES = 2**26
"""Bytes up to which weights are copied for steps; larger ones come from memory however they lie."""
FEW = 4
"""Steps that are over before a copy would have paid."""
MAX_TOKENS = 1024
"""Prompt tokens that go through a layer together."""


class BareModel:
    """A model's weights and the arithmetic of its layers."""

    def __init__(self, backbone: Backbone, names: Sequence[str] = ()):
        """
        Raises:
            Unknown: a family, a layer or rotary positions that aren't known here.
        """
        model = backbone.model
        if type(model).__name__ not in FAMILIES or not backbone.is_split:
            raise Unknown(type(model).__name__)
        base, config = model.base_model, model.config
        if base.rotary_emb.rope_type not in STATIC_ROPES or type(base.embed_tokens) is not nn.Embedding:
            raise Unknown("rotary positions or embeddings")
        self.embed, self.rotary = base.embed_tokens, base.rotary_emb
        self.layers: list[Layer] = [layer_of(layer, names) for layer in base.layers]
        self.norm, self.head = Norm(base.norm), Joint(backbone.head, names=names)
        self.joints = [joint for layer in self.layers for joint in layer.joints] + [self.head]
        attention = base.layers[0].self_attn
        self.size, self.heads = int(attention.head_dim), int(config.num_key_value_heads)
        self.queries, self.scaling = int(config.num_attention_heads), float(attention.scaling)
        self.is_adapted = bool(names)
        self.has_copies, self.merged = False, None
        self._angles = torch.empty(0)

    @property
    def like(self) -> Tensor:
        """(H, D), for sizes, dtype and device."""
        return self.embed.weight.new_empty(self.heads, self.size)

    def forget(self) -> None:
        """Let go of all copies of weights."""
        self.has_copies, self.merged = False, None
        for joint in self.joints:
            joint.forget()

    def copy(self, adapter: str | None) -> None:
        """Make the copies that steps of few rows are fast with; of one adapter, or of whichever."""
        self.has_copies, self.merged = True, adapter
        if sum(joint.num_bytes for joint in self.joints) <= MAX_COPIES:
            for joint in self.joints:
                joint.copy(adapter)

    def angles(self, position_N: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        """Cosine and signed sine (N, queries + H, D); the scores' scale is in the queries' part."""
        weight = self.embed.weight
        angles = self._angles
        if len(angles) <= longest or (angles.dtype, angles.device) != (weight.dtype, weight.device):
            size = 256 * (1 + 2 * longest // 256)
            place = torch.arange(size, device=weight.device)[None]
            cos, sin = self.rotary(weight[:1], place)
            sin = torch.cat((-sin[..., : self.size // 2], sin[..., self.size // 2 :]), -1)
            self._angles = torch.stack((cos[0], sin[0]), 1)
            self._scale = weight.new_ones(1, self.queries + self.heads, 1)
            self._scale[:, : self.queries] = self.scaling
        found = self._angles.index_select(0, position_N)
        return found[:, :1] * self._scale, found[:, 1:] * self._scale

    def heads_of(self, layer: Layer, x_ND: Tensor, angles: tuple[Tensor, Tensor], voices: Voices) -> Tensor:
        """(N, queries + 2 H, D): scaled queries and keys with their positions in them, and values."""
        heads = layer.qkv(layer.norm_in(x_ND), voices).view(x_ND.shape[0], -1, self.size)
        both = heads[:, : -self.heads]
        if layer.q_norm is not None and layer.k_norm is not None:
            for part, norm in (
                (both[:, : self.queries], layer.q_norm),
                (both[:, self.queries :], layer.k_norm),
            ):
                part.copy_(norm(part))
        turned = both.roll(self.size // 2, -1)
        both.mul_(angles[0]).addcmul_(turned, angles[1])
        return heads

    def finish(self, layer: Layer, x_ND: Tensor, found: Tensor, voices: Voices) -> None:
        """What follows on the attention, in place."""
        layer.out.add_to(x_ND, found, voices)
        both = layer.gate_up(layer.norm_mlp(x_ND), voices)
        half = both.shape[1] // 2
        layer.down.add_to(x_ND, layer.act(both[:, :half]).mul_(both[:, half:]), voices)


class BareSpeaker:
    """Rows that are drawn together, a `Speaker`."""

    shares_prompts = True

    def __init__(self, model: BareModel, backbone: Backbone, stacked: Stacked | None = None):
        """`stacked` None: whichever adapter is on speaks, whatever an opening says."""
        self._model, self._backbone, self._stacked = model, backbone, stacked
        self._blocks: list[Block] = []
        self._names: list[str | None] = []
        self._num_steps = 0
        """Since there were no rows."""
        self._is_ready = False

    @classmethod
    def of(cls, backbone: Backbone, stacked: Stacked | None = None) -> BareSpeaker | None:
        """None for a model whose layers aren't known here, or where this isn't what its modules compute."""
        names = _adapters_of(backbone.model)
        # A sharding trainer makes another class of it, with weights of another kind.
        kind = (type(backbone.model), type(next(backbone.model.parameters())), names)
        if backbone.bare is None or backbone.bare[0] != kind:
            backbone.bare = (kind, _proven(backbone, names))
        return None if backbone.bare[1] is None else cls(backbone.bare[1], backbone, stacked)

    @staticmethod
    def forget(backbone: Backbone) -> None:
        """Weights are others now. Rows that are under way go on with the new ones."""
        if backbone.bare is not None and backbone.bare[1] is not None:
            backbone.bare[1].forget()

    @property
    def num_rows(self) -> int:
        return len(self._names)

    # -- prompts ----------------------------------------------------------------------------------

    def admit(self, openings: Sequence[Opening]) -> Tensor:
        """Prefill, every prompt once. (n, V) logits of the new rows' first tokens."""
        model = self._model
        if not self._names:
            model.forget()
            self._num_steps = 0
        names = [self._name(o) for o in openings]
        first_rows = [self.num_rows]
        for opening in openings:
            first_rows.append(first_rows[-1] + opening.copies)
        hidden: list[Tensor] = []
        order: list[int] = []
        with torch.inference_mode():
            for numbers in split_blocks(openings):
                some = [openings[u] for u in numbers]
                block = Block(some, [first_rows[u] for u in numbers], len(model.layers), model.like)
                for part in _chunks(some):
                    spoken = [names[numbers[g]] for g in part]
                    hidden.append(prefill(model, block, [some[g] for g in part], part.start, spoken))
                self._blocks.append(block)
                order += numbers
            hidden_UD = model.norm(hidden[0] if len(hidden) == 1 else torch.cat(hidden))
        self._names += [name for o, name in zip(openings, names, strict=True) for _ in range(o.copies)]
        self._is_ready = False
        place = {u: i for i, u in enumerate(order)}
        index = [place[u] for u, o in enumerate(openings) for _ in range(o.copies)]
        logits_UV = self._logits(hidden_UD, Voices([names[u] for u in order]))
        is_same = index == list(range(len(logits_UV)))
        return logits_UV if is_same else logits_UV[torch.tensor(index, device=logits_UV.device)]

    def _name(self, opening: Opening) -> str | None:
        if self._stacked is None:
            return _active(self._backbone.model) if self._model.is_adapted else None
        return opening.adapter

    @torch.no_grad()
    def _logits(self, hidden_ND: Tensor, voices: Voices) -> Tensor:
        """At least float32; an ordinary tensor, for whatever the sampler does with it."""
        return self._backbone.transform(self._model.head(hidden_ND, voices))

    # -- steps ------------------------------------------------------------------------------------

    def step(self, token_B: Tensor) -> Tensor:
        """One token a row through all layers; (B, V) logits of the next."""
        model = self._model
        if not self._is_ready:
            self._prepare(token_B.device)
        if self._num_steps >= FEW and not model.has_copies:
            with torch.no_grad():
                model.copy(self._voices.only)
        self._num_steps += 1
        with torch.inference_mode():
            for block in self._blocks:
                block.step()
            x_BD = nn.functional.embedding(token_B, model.embed.weight)
            angles = model.angles(self._position_B, self._longest)
            voices = self._voices
            for number, layer in enumerate(model.layers):
                heads_BHD = model.heads_of(layer, x_BD, angles, voices)
                model.finish(layer, x_BD, self._attend(number, heads_BHD), voices)
            hidden_BD = model.norm(x_BD)
            self._position_B.add_(1)
            self._longest += 1
        return self._logits(hidden_BD, voices)

    @torch.inference_mode()
    def _prepare(self, device: torch.device) -> None:
        """What stays the same from step to step while no row comes or goes."""
        self._blocks = join_blocks(self._blocks)
        position_of = {}
        for block in self._blocks:
            block.begin(self.num_rows)
            position_of |= dict(zip(block.rows, block.positions, strict=True))
        self._longest = max(position_of.values())
        self._position_B = torch.tensor([position_of[row] for row in range(self.num_rows)], device=device)
        self._voices = Voices(self._names)
        if self._model.merged not in (None, self._voices.only):
            self._model.forget()
        self._is_ready = True

    def _attend(self, layer: int, heads_BHD: Tensor) -> Tensor:
        """(B, queries · D) of all blocks, in the rows' order."""
        first = self._blocks[0]
        if first.is_whole:
            return first.attend(layer, heads_BHD)
        out = heads_BHD.new_empty(len(heads_BHD), self._model.queries * self._model.size)
        for block in self._blocks:
            found = block.attend(layer, heads_BHD)
            if block.is_dense:
                out[block.span] = found
            else:
                out.index_copy_(0, block.targets, found.index_select(0, block.places))
        return out

    def leave(self, rows: Sequence[int], keep: Sequence[bool]) -> list[Prefix | None]:
        """Rows go; what is theirs alone is forgotten, or handed over where `keep`."""
        with torch.inference_mode():
            owner = {row: block for block in self._blocks for row in block.rows}
            kept = [owner[r].prefix(r) if wanted else None for r, wanted in zip(rows, keep, strict=True)]
            gone = set(rows)
            renumbered, count = [], 0
            for row in range(self.num_rows):
                renumbered.append(-1 if row in gone else count)
                count += row not in gone
            for block in self._blocks:
                block.leave(renumbered)
        self._blocks = [block for block in self._blocks if block.rows]
        self._names = [name for row, name in enumerate(self._names) if row not in gone]
        self._is_ready = False
        if not self._names:
            self._model.forget()
        return kept


def prefill(
    model: BareModel, block: Block, openings: Sequence[Opening], first: int, names: Sequence[str | None]
) -> Tensor:
    """Run the new tokens of prompts, one behind the other, and fill the block from group `first` on.

    Returns:
        (U, D) before the last norm, of each prompt's last token: in the last layer no other is needed.
    """
    device = model.embed.weight.device
    runs = _runs(openings)
    news = [o.num_new for o in openings]
    ids = [token for o in openings for token in o.ids[len(o.ids) - o.num_new :]]
    places = [place for o in openings for place in range(len(o.ids) - o.num_new, len(o.ids))]
    voices = Voices([name for name, count in zip(names, news, strict=True) for _ in range(count)])
    angles = model.angles(torch.tensor(places, device=device), max(len(o.ids) for o in openings))
    x_ND = nn.functional.embedding(torch.tensor(ids, device=device), model.embed.weight)
    last_U = torch.tensor(news, device=device).cumsum(0) - 1
    for number, layer in enumerate(model.layers):
        is_last = number == len(model.layers) - 1
        heads = model.heads_of(layer, x_ND, angles, voices)
        found = [_attend_run(model, block, number, run, openings, first, heads, is_last) for run in runs]
        if is_last:
            x_ND, voices = x_ND[last_U], Voices(names)
        model.finish(layer, x_ND, found[0] if len(found) == 1 else torch.cat(found), voices)
    return x_ND


def _attend_run(
    model: BareModel,
    block: Block,
    layer: int,
    run: tuple[int, int, int],
    openings: Sequence[Opening],
    first: int,
    heads: Tensor,
    is_last: bool,
) -> Tensor:
    """(tokens, queries · D) of prompts of one shape; their last tokens' alone where `is_last`."""
    start, count, token = run
    new = openings[start].num_new
    tokens = slice(token, token + count * new)
    parts = heads[tokens].view(count, new, -1, model.size).transpose(1, 2)
    query, key, value = parts.split((model.queries, model.heads, model.heads), 1)
    mask, before = None, [o.prefix for o in openings[start : start + count]]
    if before[0] is not None:
        key = torch.cat((torch.stack([p.keys[layer] for p in before if p is not None]), key), 2)
        value = torch.cat((torch.stack([p.values[layer] for p in before if p is not None]), value), 2)
        mask = query.new_ones(new, key.shape[2], dtype=torch.bool).tril(before[0].length)
    block.fill(layer, first + start, key, value)
    if is_last:
        query, mask = query[:, :, -1:], None
    out = nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None and not is_last,
        scale=1.0,
        enable_gqa=model.queries != model.heads,
    )
    return out.transpose(1, 2).reshape(-1, model.queries * model.size)


def _runs(openings: Sequence[Opening]) -> list[tuple[int, int, int]]:
    """(first opening, how many, first token) of neighbours of equal lengths."""
    runs: list[tuple[int, int, int]] = []
    shape, token = None, 0
    for u, opening in enumerate(openings):
        if runs and shape == (opening.num_new, len(opening.ids)):
            start, count, begin = runs[-1]
            runs[-1] = (start, count + 1, begin)
        else:
            runs.append((u, 1, token))
        shape, token = (opening.num_new, len(opening.ids)), token + opening.num_new
    return runs


def _chunks(openings: Sequence[Opening]) -> list[range]:
    """Neighbours whose new tokens go through together."""
    chunks: list[range] = []
    tokens = 0
    for u, opening in enumerate(openings):
        if chunks and tokens + opening.num_new <= MAX_TOKENS:
            chunks[-1], tokens = range(chunks[-1].start, u + 1), tokens + opening.num_new
        else:
            chunks.append(range(u, u + 1))
            tokens = opening.num_new
    return chunks


def _adapters_of(model: Any) -> tuple[str, ...]:
    """In the order in which they were attached; one may be on some layers only."""
    return tuple(dict.fromkeys(n for m in model.modules() if isinstance(m, LoraLayer) for n in m.lora_A))


def _active(model: Any) -> str | None:
    """The adapter that is on."""
    layer = next((m for m in model.modules() if isinstance(m, LoraLayer)), None)
    return None if layer is None or layer.disable_adapters else layer.active_adapters[0]


def _proven(backbone: Backbone, names: Sequence[str]) -> BareModel | None:
    """None where the model isn't known, or says otherwise than its modules on a few tokens."""
    try:
        model = BareModel(backbone, names)
    except (Unknown, AttributeError):
        return None
    vocab = backbone.vocab_size
    prompts = [tuple((7 * i + k) % vocab for i in range(n)) for k, n in ((1, 5), (2, 3))]
    speaker = BareSpeaker(model, backbone)
    first_3V = speaker.admit([Opening(ids, copies=2 - k) for k, ids in enumerate(prompts)])
    fed_3 = torch.tensor([3, 4, 5], device=backbone.device) % vocab
    second_3V = speaker.step(fed_3)
    for row, prompt in enumerate((prompts[0], *prompts)):
        ids = torch.tensor([[*prompt, int(fed_3[row])]], device=backbone.device)
        with torch.no_grad():
            plain_2V = backbone.logits(backbone.hidden(ids)[0, -2:])
        gap = (torch.stack((first_3V[row], second_3V[row])) - plain_2V).abs().max()
        # Rounding comes to 1e-5 on weights drawn at random for 24 layers; another formula to more than this.
        bound = 1e-3 if plain_2V.dtype == backbone.model.dtype else 0.1
        if not float(gap) <= bound * max(1.0, float(plain_2V.abs().max())):
            return None
    return model
