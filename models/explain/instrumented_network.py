"""A network whose attention can be recorded, whose heads can be silenced, and which can be differentiated with respect
to its input embeddings. Probes replace parts of its attention, so it must be a copy that answers no requests."""

from collections.abc import Callable, Generator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from ..core.errors import UnsupportedError
from ..network.attention import Attention
from ..network.cache import MemoryView
from ..network.cross_attention import build_cross_context
from ..network.encoder_decoder import EncoderDecoder, PreDecoderBlock, SharedTextTransformer
from ..network.heads import Pooler, SequenceHead, count_read_tokens
from ..network.ragged import RaggedBatch
from ..network.transformer import Transformer
from ..network.work_pieces import finish
from ..recurrent.recurrent_network import RecurrentTranslator
from . import head_scores
from .attention_probe import AttentionProbe, WeightBuffer
from .explain_types import AttentionPart, ExplanationRequest, InputTokens
from .head_scores import GoalReader

Seq2SeqNetwork = EncoderDecoder | RecurrentTranslator
LayersAndHeads = tuple[int, int]  # numbers of layers and heads
T = TypeVar("T")


class Segment(NamedTuple):
    """A part of the network with its own autograd graph: its input, its output, and the rows that it computes."""

    entered: Tensor
    made: Tensor
    rows: int


class InstrumentedNetwork:
    """`silenced`: heads whose output is zero, as (part, layer, head); the caller may change it at any time."""

    def __init__(self, network: nn.Module, head: nn.Module) -> None:
        """`network` and `head` as from models.checkpoint.load. They are converted to constant float32, in place."""
        if isinstance(network, SharedTextTransformer):
            raise UnsupportedError("answers of a head on a decoder's states are not explained")
        if isinstance(head, EncoderDecoder) and head.config.decoder.two_streams:
            raise UnsupportedError("answers of a decoder with two rows for each token are not explained")
        freeze_parameters([network, head])
        self.network, self.head = network.eval(), head.eval()
        self.seq2seq: Seq2SeqNetwork | None = head if isinstance(head, Seq2SeqNetwork) else None
        self.probes: dict[AttentionPart, list[AttentionProbe]] = {
            part: [AttentionProbe(attention) for attention in found]
            for part, found in find_attentions(network, head).items()
        }
        self.silenced: set[tuple[AttentionPart, int, int]] = set()

    def release(self) -> None:
        """Free all numbers at once, even if a cycle of references keeps the network alive."""
        for module in (self.network, self.head):
            for each in (*module.parameters(), *module.buffers()):
                each.data = each.new_empty(0)

    @property
    def layout(self) -> Mapping[AttentionPart, LayersAndHeads]:
        """The layers and heads of each part that has attention; a recurrent network's is one head of
        cross-attention."""
        if isinstance(self.seq2seq, RecurrentTranslator):
            return {} if self.seq2seq.config.attention == "none" else {"cross": (1, 1)}
        return {part: (len(probes), probes[0].heads) for part, probes in self.probes.items()}

    @property
    def token_embeddings(self) -> tuple[nn.Embedding, nn.Embedding]:
        """The tables of the source and of the target; most encoder-decoders have one for both."""
        if isinstance(self.seq2seq, EncoderDecoder):
            return self.seq2seq.encoder.tokens, self.seq2seq.decoder.tokens
        table = cast(nn.Embedding, self.network.tokens)
        return table, table

    @torch.no_grad()
    def embeddings(self, text: InputTokens) -> Tensor:
        """[rows, E] token embeddings, before scaling, positions and projection. UnsupportedError if the two sides have
        embeddings of different widths."""
        return self.embed_sides(text.source, text.tokens)

    def embed_sides(self, source: Sequence[int], tokens: Sequence[int]) -> Tensor:
        """As `embeddings`, of other tokens."""
        there, here = self.token_embeddings
        if source and there.embedding_dim != here.embedding_dim:
            raise UnsupportedError("its two sides have embeddings of different widths; ask for attention")
        sides = ((there, source), (here, tokens)) if source else ((here, tokens),)
        return torch.cat([table(torch.tensor(list(ids), device=table.weight.device)) for table, ids in sides])

    def states(self, texts: Sequence[InputTokens], embedded: Tensor | None = None) -> Tensor:
        """[N, T, W] the states that the head reads, for N texts of equal lengths: one for each row of `tokens`.

        `embedded` [N, rows, E] replaces the token embeddings.
        """
        self._apply_silenced()
        tokens, source = self._batches(texts, embedded)
        states = (
            cast(Transformer, self.network)(tokens) if self.seq2seq is None else self.seq2seq.readout(source, tokens)
        )
        return cast(Tensor, states.unflatten(0, (len(texts), -1)))

    def states_in_pieces(
        self, texts: Sequence[InputTokens], piece: int, embedded: Tensor | None = None
    ) -> Generator[None, None, Tensor]:
        """As `states`, without gradients. Yields between pieces of about `piece` rows, several for a long text.

        A recurrent encoder-decoder is computed in one piece.
        """
        if isinstance(self.seq2seq, RecurrentTranslator):
            with torch.no_grad():
                return self.states(texts, embedded)
        tokens, source = self._batches(texts, embedded)
        if self.seq2seq is None:
            body = cast(Transformer, self.network)
            layers, depth = self._run_layers(body, tokens, set(), {}), len(body.blocks)
        else:
            layers, depth = self._run_stacks(tokens, source, {}), len(self.seq2seq.decoder.blocks)
        states: Any = yield from run_in_pieces(layers, piece * depth)
        return cast(Tensor, states.unflatten(0, (len(texts), -1)))

    def segments(self, texts: Sequence[InputTokens], embedded: Tensor) -> Generator[int, None, list[Segment]]:
        """The network as a list of segments (input, output), each with its own autograd graph, so that gradients can be
        computed segment by segment from the last to the first. Yields the number of rows of each layer when it is done.

        A recurrent encoder-decoder is one segment.
        """
        if isinstance(self.seq2seq, RecurrentTranslator):
            with torch.inference_mode(False), torch.enable_grad():
                states = self.states(texts, embedded)
                return [Segment(embedded, states, states.size(0) * states.size(1))]
        if self.seq2seq is not None:
            return (yield from self._segments_of_stacks(self.seq2seq, texts, embedded))
        body = cast(Transformer, self.network)
        if body.config.key_layers or body.config.layer_embedding:
            message = "its layers read more than the layer before them, so no gradients are computed"
            raise UnsupportedError(f"{message}; ask for attention or occlusion")
        with torch.inference_mode(False), torch.enable_grad():
            x, frame = body.embed(self._batches(texts, embedded)[0])
        found = [Segment(embedded, x, len(x))]
        blocks: list[Callable[[Tensor], Tensor]] = [partial(block, frame=frame) for block in body.blocks]
        for part in (*blocks, body.close):
            self._apply_silenced()
            with torch.inference_mode(False), torch.enable_grad():
                entered = x.detach().requires_grad_()
                x = part(entered)
            found.append(Segment(entered, x, len(x)))
            yield len(x)
        last = found.pop()
        with torch.inference_mode(False), torch.enable_grad():
            return [*found, last._replace(made=unflatten_texts(last.made, texts))]

    def _segments_of_stacks(
        self, network: EncoderDecoder, texts: Sequence[InputTokens], embedded: Tensor
    ) -> Generator[int, None, list[Segment]]:
        """As `segments`. Between two layers of either stack are the rows of both, flat and one after the other, since
        each layer of the decoder reads the encoder's."""
        encoder, decoder = network.encoder, network.decoder
        with torch.inference_mode(False), torch.enable_grad():
            tokens, source = self._batches(texts, embedded)
            there, frame = encoder.embed(source)
            here, own_frame = Transformer.embed(decoder, tokens)
            x = torch.cat((there.flatten(), here.flatten()))
        shapes = there.size(), here.size()

        def read_source(block: nn.Module, there: Tensor, here: Tensor) -> tuple[Tensor, Tensor]:
            return block(there, frame), here

        def write(block: nn.Module, there: Tensor, here: Tensor) -> tuple[Tensor, Tensor]:
            memory = decoder.build_layer_memory(cast(PreDecoderBlock, block).layer, there, source, tokens.lengths)
            crossing = build_cross_context(tokens, MemoryView([memory], range(len(texts))), here.dtype)
            return there, block(here, replace(own_frame, cross=crossing))

        steps: list[tuple[Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], int]] = [
            *((partial(read_source, block), len(there)) for block in encoder.blocks),
            (lambda there, here: (encoder.close(there), here), len(there)),
            *((partial(write, block), len(here)) for block in decoder.blocks),
        ]
        found = [Segment(embedded, x, len(there) + len(here))]
        yield found[0].rows
        for step, rows in steps:
            self._apply_silenced()
            with torch.inference_mode(False), torch.enable_grad():
                entered = x.detach().requires_grad_()
                parts = torch.split(entered, [shape.numel() for shape in shapes])
                sides = step(*(part.view(shape) for part, shape in zip(parts, shapes, strict=True)))
                shapes = sides[0].size(), sides[1].size()
                x = torch.cat([side.flatten() for side in sides])
            found.append(Segment(entered, x, rows))
            yield rows
        with torch.inference_mode(False), torch.enable_grad():
            entered = x.detach().requires_grad_()
            states = network.scale_states(decoder.close(entered[shapes[0].numel() :].view(shapes[1])))
            return [*found, Segment(entered, unflatten_texts(states, texts), len(states))]

    def read_goals(self, request: ExplanationRequest, piece: int) -> Generator[None, None, GoalReader]:
        """The reader of the goals' values from states. Yields as `states_in_pieces` does."""
        if request.compared_text is None:
            return GoalReader(self.head, request)
        states = yield from self.states_in_pieces([request.compared_text], piece)
        with torch.no_grad():
            return GoalReader(self.head, request, head_scores.pooled_vectors(cast(Pooler, self.head), states))

    @torch.no_grad()
    def scores(self, text: InputTokens, rows: Sequence[int] = (), beside: InputTokens | None = None) -> Tensor:
        """Raw scores: [1, C] of labels or options; [T, C] if the head scores every row, or [R, C] for those `rows`;
        [1, 1] of an embedder, the cosine with the text `beside`.

        Row r of a generator or encoder-decoder is for the token after row r.
        """
        states = self.states([text])
        if isinstance(self.head, Pooler):
            assert beside is not None
            other = head_scores.pooled_vectors(self.head, self.states([beside]))
            return head_scores.similarity(self.head, states, other)
        if isinstance(self.head, head_scores.RowReadingHead):
            return head_scores.label_scores(self.head, states, text)
        needed = [0] if isinstance(self.head, SequenceHead) else list(rows or range(len(text.tokens)))
        states = states[:, : count_read_tokens(self.head, text.tokens)]
        some, matrix, bias = head_scores.final_product(self.head, states, needed)
        return F.linear(some[0], matrix, bias)

    def record_attention(
        self, text: InputTokens, buffers: Mapping[AttentionPart, WeightBuffer]
    ) -> Generator[int, None, None]:
        """Record the attention weights of one text, layer by layer. Yields the number of rows of each layer when it is
        done."""
        tokens, source = self._batches([text], None)
        if self.seq2seq is None:
            yield from self._run_layers(cast(Transformer, self.network), tokens, {"self"}, buffers)
            return
        assert isinstance(self.seq2seq, EncoderDecoder)
        if buffers.keys() <= {"encoder"}:
            yield from self._run_layers(self.seq2seq.encoder, source, {"encoder"}, buffers)
        else:
            yield from self._run_stacks(tokens, source, buffers)

    def _run_stacks(
        self, tokens: RaggedBatch, source: RaggedBatch, buffers: Mapping[AttentionPart, WeightBuffer]
    ) -> Generator[int, None, Tensor]:
        """The states of an encoder-decoder, as `_run_layers` computes those of each stack."""
        assert isinstance(self.seq2seq, EncoderDecoder)
        decoder = self.seq2seq.decoder
        encoded = yield from self._run_layers(self.seq2seq.encoder, source, {"encoder"}, buffers)
        with torch.inference_mode(False), torch.no_grad():
            memory = finish(decoder.build_memory(encoded, source, tokens.lengths))
            view = MemoryView([memory], range(len(memory.lengths)))
        written = replace(tokens, memory=view)
        states = yield from self._run_layers(decoder, written, {"decoder", "cross"}, buffers)
        with torch.inference_mode(False), torch.no_grad():
            return self.seq2seq.scale_states(states)

    def _run_layers(
        self,
        body: Transformer,
        batch: RaggedBatch,
        parts: AbstractSet[AttentionPart],
        buffers: Mapping[AttentionPart, WeightBuffer],
    ) -> Generator[int, None, Tensor]:
        """The states of a stack. Its probes are active only while a layer runs, so other calls may run between two
        yields."""
        with torch.inference_mode(False), torch.no_grad():
            x, frame = body.embed(batch)
        for layer, block in enumerate(body.blocks):
            over = [(self.probes[part][layer], buffers[part]) for part in parts & buffers.keys()]
            self._apply_silenced()
            with torch.inference_mode(False), torch.no_grad(), ExitStack() as shown:
                for probe, buffer in over:
                    shown.enter_context(probe.record_into(buffer))
                x = block(x, frame)
            yield len(x)
        with torch.inference_mode(False), torch.no_grad():
            return body.close(x)

    @torch.no_grad()
    def alignments(self, text: InputTokens) -> NDArray[np.float32]:
        """[Q, K] the attention weights of a recurrent network: for each target token over the source tokens."""
        assert isinstance(self.seq2seq, RecurrentTranslator)
        device, rows = self.token_embeddings[1].weight.device, []
        state = self.seq2seq.initial_state(RaggedBatch.of([text.source], device=device))
        for token in text.tokens:
            _, state = self.seq2seq.step(torch.tensor([token], device=device), state)
            rows.append(self.seq2seq.attention_weights(state)[0])
        found: NDArray[np.float32] = torch.stack(rows).cpu().numpy()
        return found

    def _batches(self, texts: Sequence[InputTokens], embedded: Tensor | None) -> tuple[RaggedBatch, RaggedBatch]:
        """The batches of the targets and of the sources; sources may be empty."""
        read, device = len(texts[0].source), self.token_embeddings[1].weight.device
        tokens = RaggedBatch.of([text.tokens for text in texts], self._segments(texts), device)
        source = RaggedBatch.of([text.source for text in texts], device=device)
        if embedded is None:
            return tokens, source
        there, written = embedded[:, :read].flatten(0, 1), embedded[:, read:].flatten(0, 1)
        return replace(tokens, embedded=written), replace(source, embedded=there)

    def _segments(self, texts: Sequence[InputTokens]) -> list[tuple[int, ...]] | None:
        if getattr(self.network, "segments", None) is None:
            return None
        return [text.segments or (0,) * len(text.tokens) for text in texts]

    def _apply_silenced(self) -> None:
        for part, probes in self.probes.items():
            for probe in probes:
                probe.silenced_heads = {
                    head for where, layer, head in self.silenced if (where, layer) == (part, probe.layer)
                }


def unflatten_texts(states: Tensor, texts: Sequence[InputTokens]) -> Tensor:
    """[N * T, W] the states of N texts to [N, T, W]."""
    return cast(Tensor, cast(Any, states).unflatten(0, (len(texts), -1)))


def run_in_pieces(layers: Generator[int, None, T], most: int) -> Generator[None, None, T]:
    """The result of `layers`; yields each time `most` further rows have gone through a layer."""
    done = 0
    while True:
        try:
            done += next(layers)
        except StopIteration as over:
            return cast(T, over.value)
        if done >= most:
            yield
            done = 0


def find_attentions(network: nn.Module, head: nn.Module) -> dict[AttentionPart, list[Attention]]:
    """The attention layers of each part, in order; nothing if other layers of the part are recurrent."""
    if isinstance(head, EncoderDecoder):
        bodies: dict[AttentionPart, Transformer] = {"encoder": head.encoder, "decoder": head.decoder}
        crossing: dict[AttentionPart, list[Attention]] = {"cross": list(head.decoder.cross_attentions)}
    else:
        is_shown = isinstance(network, Transformer) and not network.config.is_recurrent
        bodies, crossing = {"self": cast(Transformer, network)} if is_shown else {}, {}
    looking_back = {part: [cast(Attention, block.attention) for block in body.blocks] for part, body in bodies.items()}
    return looking_back | crossing


def freeze_parameters(modules: Sequence[nn.Module]) -> None:
    """Make all numbers float32 and constant for autograd; shared tensors stay shared.

    Tensors loaded under torch's inference mode cannot take part in a backward pass, so they are copied.
    """
    made: dict[int, Tensor] = {}
    with torch.inference_mode(False):
        for part in nn.ModuleList(modules).modules():
            numbers = [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]
            for name, kept in numbers:
                if id(kept) not in made:
                    made[id(kept)] = frozen_tensor(kept)
                setattr(part, name, made[id(kept)])


def frozen_tensor(kept: Tensor) -> Tensor:
    if not kept.is_inference() and (kept.dtype == torch.float32 or not kept.is_floating_point()):
        return kept.requires_grad_(False)
    copied = kept.detach().clone()
    copied = copied.float() if copied.is_floating_point() else copied
    return nn.Parameter(copied, requires_grad=False) if isinstance(kept, nn.Parameter) else copied
