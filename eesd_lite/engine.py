"""The engine: one target, one conversation's cache, and `generate`, which every front end calls.

Follow one token from `generate` downward: prefill, then rounds of draft, verify, accept, crop
(`eesd_lite.speculative`), then `Emitter`. After every round, and however a generation ends, the cache is what a fresh
prefill of the visible tokens would give. One sequence at a time; an engine belongs to one thread at a time.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from eesd_lite.cache import Rows
from eesd_lite.config import ModelConfig
from eesd_lite.controller import Controller, LearnsDraftTime
from eesd_lite.controllers_tree import TreeController
from eesd_lite.conversation_controller import ConversationController
from eesd_lite.diagnose import first_break
from eesd_lite.drafters import drafter_factory
from eesd_lite.emitter import Emitter, TokenEvent
from eesd_lite.errors import EesdError, ModelError, NotFiniteError
from eesd_lite.exit_choice import ExitTable, ExitWish
from eesd_lite.exit_head import ExitHead
from eesd_lite.opening import EngineOptions, open_parts
from eesd_lite.params import SamplingParams
from eesd_lite.placement import Plan
from eesd_lite.prefix_file import read_prefix, write_prefix
from eesd_lite.progress import Progress, no_progress
from eesd_lite.prompt import prompt_ids, shared_length
from eesd_lite.sampling import Sampler
from eesd_lite.several_heads import SeveralHeads
from eesd_lite.speculative import Drafter, Round, accept, crop, keep_prefix, verify
from eesd_lite.stats import Stats
from eesd_lite.streamer import Reader
from eesd_lite.target import Target
from eesd_lite.text import TextCodec
from eesd_lite.tree_growth import draft_any, tell


class Engine:
    """Use `Engine.from_pretrained`. `stats` counts since the engine was made; `plan` says what lies where."""

    def __init__(
        self,
        target: Target,
        text: TextCodec,
        plan: Plan,
        *,
        heads: Sequence[ExitHead],
        controller: str,
        draft_limit: int,
        name: str,
        drafter: str = "head",
        notices: Sequence[str] = (),
        identity: str = "",
        exits: ExitTable | None = None,
    ) -> None:
        self.target, self.text, self.plan, self.heads = target, text, plan, tuple(heads)
        self.head = heads[-1] if heads else None  # the deepest
        self._several = SeveralHeads(target, heads)
        self.config: ModelConfig = target.config
        self.name = name
        self.notices = tuple(notices)
        self.identity, self.exits = identity, exits
        self.stats = Stats()
        self.draft_limit = draft_limit
        self.drafter_factory = drafter_factory(drafter, self.heads)
        self.clock = time.perf_counter
        self._cached: list[int] = []  # tokens whose keys and values every cache holds
        self.last_round: Round | None = None
        self._closed = False
        self._open: weakref.ref[Generator[TokenEvent, None, None]] | None = None
        self._controllers = ConversationController(controller, {head.exit_layer: head.prior for head in self.heads})

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path,
        *,
        device: str = "cpu",
        device_memory: str | int | None = None,
        resident_layers: int | None = None,
        exit_layer: ExitWish = None,
        head: str | Path | None = None,
        force_head: bool = False,
        controller: str = "calibrated",
        context: int | None = None,
        threads: int | None = None,
        dtype: str = "bfloat16",
        quantize: str | None = None,
        throttle: float | None = None,
        draft_limit: int | None = None,
        drafter: str = "head",
        template: str | None = None,
        host_memory: str | int | None = None,
        host_mode: str = "auto",
        plan_file: str | Path | None = None,
        weights: str | None = None,
        draft_vocab: int | str | None = None,
        head_bits: int | None = None,
        reader: Reader | None = None,
        progress: Progress = no_progress,
    ) -> Engine:
        """Load `model`: a recipe's name, a folder, or a Hub id.

        `device_memory` (such as "8GiB") bounds everything the engine allocates; `resident_layers` fixes the split by
        hand. `head` is a file, a folder of them, "off", "instant" or "random"; None: what belongs to the model.
        `exit_layer` "auto" drafts where most is to be expected, by the heads' agreement and a short measurement; of
        several layers, such as (10, 20), all heads are resident and every round drafts where it promises most.
        `drafter` "ngram" proposes what followed the same tokens earlier and needs no head; "both" takes what is
        believed more. `host_memory` holds layers that do not fit the device: `host_mode` streams them, computes them on
        the CPU, or ("auto") does what a short measurement says. `plan_file` repeats a saved placement, or saves it.
        `weights` names the file (or index) to read where the folder holds several. `quantize` ("nf4" or "fp4") loads
        a 16-bit model into bitsandbytes' 4-bit form.
        `draft_vocab` lets the head draft so many of the most frequent tokens only, which makes drafts cheaper;
        `head_bits` (16, 8 or 4; None: 8 where that has a kernel) is for the weights of the head and of its copy of
        lm_head ("all": of all tokens).
        `throttle` slows reading to so many bytes per second (simulated links). Raises one of `errors.USER_ERRORS`.
        """
        opened = open_parts(
            model,
            EngineOptions(
                device=device, device_memory=device_memory, resident_layers=resident_layers, exit_layer=exit_layer,
                head=head, force_head=force_head, controller=controller, context=context, threads=threads, dtype=dtype,
                quantize=quantize, throttle=throttle, draft_limit=draft_limit, drafter=drafter, template=template,
                host_memory=host_memory, host_mode=host_mode, plan_file=plan_file, weights=weights,
                draft_vocab=draft_vocab, head_bits=head_bits,
            ),
            reader,
            progress,
        )  # fmt: skip
        return cls(
            opened.target, opened.text, opened.plan, heads=opened.heads, controller=controller,
            draft_limit=opened.draft_limit, name=opened.name, drafter=drafter, notices=opened.notices,
            identity=opened.identity, exits=opened.exits,
        )  # fmt: skip

    def set_controller(self, spec: str) -> None:
        """Decide anew how much is drafted; forgets what was learned and (`off` keeps no head cache) the prefix."""
        self._controllers.set(spec)
        self.reset()

    @property
    def controller(self) -> Controller | TreeController:
        """What decides now: anew with every conversation, or the one that was assigned, until `set_controller`."""
        return self._controllers.current

    @controller.setter
    def controller(self, controller: Controller | TreeController) -> None:
        self._controllers.current = controller

    @property
    def controller_spec(self) -> str:
        """The name that was asked for."""
        return self._controllers.spec

    def reset(self) -> None:
        """Forget the cached prefix, and with it the conversation; ends a generation that is still open."""
        self._end_open()
        self._forget_tokens(0)
        self._controllers.forget()

    def _forget_tokens(self, count: int) -> None:
        """The caches hold the first `count` tokens and no others."""
        self._cached = self._cached[:count]
        for head in self.heads:
            head.forget_from(count)

    def _end_open(self) -> None:
        """There is one cache: whoever begins anew ends an earlier generation, as if its iterator had been closed."""
        earlier = self._open() if self._open is not None else None
        if earlier is not None:
            earlier.close()
        self._open = None

    def close(self) -> None:
        """Stop background reading and close files. The engine cannot generate afterwards."""
        self._closed = True
        self.target.bank.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def cached_ids(self) -> tuple[int, ...]:
        """The tokens that the next prompt may share without being read again."""
        return tuple(self._cached)

    def save_prefix(self, path: Path) -> None:
        """Write the cache of `cached_ids` to a file. PrepareError when the disk is full."""
        write_prefix(self, path)

    def load_prefix(self, path: Path) -> int:
        """Take over what `save_prefix` wrote in an earlier run; how many tokens, 0 unless it fits bit for bit."""
        self.reset()
        self._cached = read_prefix(self, path)
        return len(self._cached)

    def generate(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, progress: Progress = no_progress
    ) -> Iterator[TokenEvent]:
        """Yield events for up to `params.max_new_tokens` tokens after `prompt` (text or ids).

        The longest prefix that the cache holds is not read again. Closing the iterator early, Ctrl-C included, leaves
        the cache at what was emitted; so does beginning the next generation. `progress` hears of every layer that the
        prompt has passed. Raises PromptError before anything runs, StreamError when reading fails.
        """
        params = params if params is not None else SamplingParams()
        ids = self._check(prompt)
        self._end_open()
        self._controllers.continue_or_begin(ids, params.temperature)
        run = self._run(ids, params, progress)
        self._open = weakref.ref(run)
        return run

    def _check(self, prompt: str | Sequence[int]) -> list[int]:
        if self._closed:
            raise EesdError("the engine is closed")
        return prompt_ids(prompt, self.text, self.config, self.plan.context)

    def _run(self, ids: list[int], params: SamplingParams, progress: Progress) -> Generator[TokenEvent, None, None]:
        vocab_limit = self.text.vocab_size if self.text.vocab_size > 0 else None
        sampler = Sampler(params, self.config.vocab_size, vocab_limit)
        emitter = Emitter(params, self.text.eos_token_ids, self.text.stream())
        drafter = self._drafter(sampler)
        stats, before = self.stats, self.stats.snapshot()
        produced = 0
        try:
            visible = list(ids)
            visible.append(self._prefill(ids, sampler, drafter, progress))
            produced = 1
            yield from emitter.push(visible[-1], False)
            while not emitter.finished:
                room = min(params.max_new_tokens - produced, self.plan.context - len(visible))
                if room <= 0:
                    reason = "length" if params.max_new_tokens <= produced else "context"
                    yield from emitter.finish(reason)
                    break
                tokens, rejected = self._round(visible, sampler, drafter, depth=room - 1)
                visible += tokens
                produced += len(tokens)
                for place, token in enumerate(tokens):
                    if not emitter.finished:
                        last = place == len(tokens) - 1
                        yield from emitter.push(token, not last, rejected if last else ())
        finally:
            emitted = len(emitter.emitted_ids)
            stats.emitted += emitted
            stats.prefill_emitted += min(1, emitted)
            # Counted from the rounds themselves, so that the sums close wherever an interruption struck.
            done = stats.since(before)
            stats.cut += done.accepted + done.rounds - max(emitted - 1, 0)
            self._forget_tokens(len(ids) + emitted)
            self.target.bank.abandon()
            self._several.end()

    def _drafter(self, sampler: Sampler) -> Drafter | None:
        if self.drafter_factory is None or self.controller_spec == "off":
            return None
        return self.drafter_factory(self.target, sampler)

    def _choose(self, sampler: Sampler) -> Callable[[Tensor, int, Sequence[int]], int]:
        """The target's rule: a function of logits, position and the ids before it."""

        def choose(logits: Tensor, position: int, history: Sequence[int]) -> int:
            try:
                return sampler.choose(logits, position, history).token_id
            except NotFiniteError as error:
                raise ModelError(f"{error}; {first_break(self.target, history)}") from None

        return choose

    @torch.inference_mode()
    def _prefill(self, ids: list[int], sampler: Sampler, drafter: Drafter | None, progress: Progress) -> int:
        """Pass the part of the prompt that the cache lacks through all layers, in one sweep; the first new token."""
        started = self.clock()
        target, stats = self.target, self.stats
        shared = min(shared_length(self._cached, ids), len(ids) - 1)
        self._forget_tokens(shared)
        rows = Rows.chain(shared, len(ids) - shared, target.device)
        before = target.bank.streamed_bytes
        self._several.begin_prompt(drafts=drafter is not None)
        hidden = target.lower(target.embed(ids[shared:]), rows, progress)
        if drafter is not None:
            keep_prefix(drafter, hidden, rows)
        hidden = target.upper(hidden, rows, progress)
        logits = target.logits(hidden[-1:].contiguous())[0]
        token = self._choose(sampler)(logits, len(ids), ids)
        self._cached = list(ids)
        stats.prompt_tokens += len(ids)
        stats.prefilled_tokens += len(ids) - shared
        stats.prefill_offloaded_bytes += target.bank.streamed_bytes - before
        stats.sweeps += 1 if self.plan.sweep_bytes else 0
        stats.prefill_seconds += self.clock() - started
        return token

    @torch.inference_mode()
    def _round(
        self, visible: list[int], sampler: Sampler, drafter: Drafter | None, *, depth: int
    ) -> tuple[list[int], tuple[int, ...]]:
        """One round on the visible tokens, the last of which no layer has seen yet; what it adds, what it rejects.

        At most `depth` drafted tokens can be of use.
        """
        started = self.clock()
        target, stats, bank = self.target, self.stats, self.target.bank
        start_bytes, start_read = bank.streamed_bytes, bank.read_seconds
        limit = self.draft_limit if isinstance(self.controller, TreeController) else min(self.draft_limit, depth)
        if drafter is not None:
            self._several.begin_round(self.controller, limit)
        drafted = draft_any(
            target, drafter, self.controller, visible=visible, limit=limit, depth=depth,
            stop_ids=self.text.eos_token_ids,
        )  # fmt: skip
        draft_bytes, draft_seconds, waited = bank.streamed_bytes, self.clock() - started, bank.waited_seconds
        if isinstance(self.controller, LearnsDraftTime):
            self.controller.draft_took(draft_seconds)
        logits = verify(target, drafted)
        verified = self.clock() - started
        accepted = accept(drafted.tree, logits, self._choose(sampler), visible)
        crop(target, drafter, drafted, accepted)
        self._several.keep(drafted, accepted)
        self._cached = [*visible, *accepted.tokens[:-1]]
        seconds = self.clock() - started
        tell(self.controller, drafted, accepted, seconds)
        self.last_round = Round(
            drafted, accepted, tuple(visible), draft_seconds, verified - draft_seconds, seconds - verified,
            target.exit_layer,
        )  # fmt: skip
        stats.count_round(drafted=len(drafted.tree) - 1, accepted=len(accepted.nodes), depth=drafted.tree.depth)
        stats.draft_forwards += len(drafted.proposed_from)
        stats.target_rows += len(drafted.tree)
        stats.draft_offloaded_bytes += draft_bytes - start_bytes
        stats.verify_offloaded_bytes += bank.streamed_bytes - draft_bytes
        stats.sweeps += 1 if self.plan.sweep_bytes else 0
        stats.decode_seconds += seconds
        stats.draft_seconds += draft_seconds
        stats.wait_seconds += bank.waited_seconds - waited
        stats.read_seconds += bank.read_seconds - start_read
        return list(accepted.tokens), drafted.tree.line_below(accepted.nodes[-1] if accepted.nodes else 0)
