"""The data stage: from the ``data`` section of an experiment to packed batches.

Shapes: N sequences, T tokens of a sequence, V vocabulary of the target.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning import LightningDataModule
from torch import Tensor

from falcon_lab.bars import Bar
from falcon_lab.config.schema import DataConfig
from falcon_lab.data.corpora import corpus, first_documents, left_out
from falcon_lab.data.dialogue_card import refuse_other_author
from falcon_lab.data.documents import Document, load_template
from falcon_lab.data.encoding import Encoded, encode_all
from falcon_lab.data.feature_store import (
    FeatureStore,
    StorePlan,
    Teacher,
    build_store,
    check_store,
    plan_store,
)
from falcon_lab.data.packing import PackedSequences, pack
from falcon_lab.data.regeneration import TextParts, Write, is_kept, regenerate, served, unwritten
from falcon_lab.data.stream import Batches, BatchStream, Share, ValidationBatches
from falcon_lab.decoding.plain import continue_texts
from falcon_lab.errors import FalconLabError
from falcon_lab.files import cache_folder, check_place
from falcon_lab.interfaces import BuildContext, ComponentBuilder
from falcon_lab.model.target import Target

if TYPE_CHECKING:
    from falcon_lab.decoding.served import ServedEngine


def prepare_data(
    config: DataConfig,
    target: Target,
    *,
    drafter: Mapping[str, Any],
    components: ComponentBuilder,
    announce: Callable[[str], None],
) -> FalconDataModule:
    """Read and pack the corpus; fill the feature store that the configuration may name.

    Args:
        config: the ``data`` section.
        target: the frozen teacher.
        drafter: the YAML node of the drafter that is to be trained on it.
        components: builds that drafter.
        announce: is called with one line for the user.

    Raises:
        FalconLabError: the corpus cannot be read, or a feature store is named that is of another
            target, other data, other layers or another precision, or has no room.
    """
    data = FalconDataModule.for_target(config, target)
    taps = stored_taps(config, target, drafter, components)
    refuse_other_author(config.corpus, target)
    if (told := left_out(config.corpus)) is not None:
        announce(f"{config.corpus}: {told}")
    sequences = data.train_sequences
    tokens = round(len(sequences) * sequences.length * sequences.filled)
    announce(
        f"{config.corpus}: {tokens:,} training tokens, packed into "
        f"{len(sequences):,} sequences of {sequences.length} ({sequences.filled:.0%} filled)"
    )
    data.build_features(target, announce, taps)
    return data


def check_data(
    config: DataConfig,
    target: Target,
    *,
    drafter: Mapping[str, Any],
    components: ComponentBuilder,
    stands_in: bool = False,
) -> None:
    """See that the data can be prepared, without preparing them.

    Args:
        config: the ``data`` section.
        target: the teacher, or a stand-in of its shape.
        drafter: the YAML node of the drafter that is to be trained.
        components: builds that drafter.
        stands_in: whether it is a stand-in, which wrote no dialogues and whose features no store
            has.

    Raises:
        FalconLabError: as ``prepare_data``, as far as it can be known before.
    """
    data = FalconDataModule.for_target(config, target)
    if config.feature_store is not None:
        check_place(Path(config.feature_store), folder=True)
        taps = stored_taps(config, target, drafter, components)
        for split in () if stands_in else SPLITS:
            check_store(
                Path(config.feature_store) / split,
                target,
                taps={*taps, *config.feature_store_taps},
                kept=config.feature_store_dtype,
            )
    if config.extracted_states is not None:
        check_place(Path(config.extracted_states), folder=True)
    if config.regenerate:
        check_place(cache_folder() / TEXTS, folder=True)
    if not stands_in:
        refuse_other_author(config.corpus, target)
        data.check_server()
    data.check()


def stored_taps(
    config: DataConfig, target: Target, drafter: Mapping[str, Any], components: ComponentBuilder
) -> tuple[int, ...]:
    """Return the layers whose states a drafter reads from the feature store, if there is one.

    Raises:
        FalconLabError: the target has no such layer, or not one that the store is to have.
    """
    if config.feature_store is None:
        return ()
    target.tapped(config.feature_store_taps)
    taps: tuple[int, ...] = components.build("drafter", drafter, BuildContext(host=target)).taps
    target.tapped(taps)
    return taps


SPLITS = ("train", "validation")
"""Parts of the data, and folders of a feature store."""

FIRST = 4
"""Documents that are encoded to see whether they can be."""

TEXTS = "texts"
"""Folder of the cache for what a target has written itself."""


class FalconDataModule(LightningDataModule):
    """Packed batches of a corpus, in an order that the seed alone decides.

    With ``max_steps`` the training batches are one stream, exactly as long as the training and
    crossing the epochs of the data, so that steps govern and an epoch of Lightning's is the whole
    training. With ``max_epochs`` the stream is cut where the data begin anew.

    Args:
        config: the ``data`` section.
        tokenizer: the target's.
        max_positions: longest sequence that the target reads; None does not check.
        vocab_size: entries of the target's embedding; None does not check.
        write: continues texts as the target would; needed for ``data.regenerate``.
        author: the target's fingerprint.
        engine: the server that ``write`` asks, if it asks one.

    Raises:
        FalconLabError: the sequences are longer than the target reads; and from ``setup`` what is
            wrong with the corpus.
    """

    def __init__(
        self,
        config: DataConfig,
        tokenizer: Any,
        *,
        max_positions: int | None = None,
        vocab_size: int | None = None,
        write: Write | None = None,
        author: str = "",
        engine: ServedEngine | None = None,
    ) -> None:
        super().__init__()
        self._check(config, max_positions)
        self.config, self.tokenizer, self.vocab_size = config, tokenizer, vocab_size
        self.write, self.author, self.engine = write, author, engine
        self._train: PackedSequences | None = None
        self._validation: PackedSequences | None = None
        self._features: dict[str, FeatureStore] = {}

    @classmethod
    def for_target(cls, config: DataConfig, target: Any) -> FalconDataModule:
        """Return the data of a target, which can continue texts for ``data.regenerate``.

        Raises:
            FalconLabError: as the class; or the key of ``data.server`` cannot be one.
        """
        engine = served(target, config) if config.regenerate else None
        return cls(
            config,
            target.tokenizer,
            max_positions=target.max_positions,
            vocab_size=target.vocab_size,
            write=partial(continue_texts, target, engine=engine),
            # A server's texts are the target's but for rounding, so they are kept as another's.
            author=target.fingerprint + ("" if engine is None else ":served"),
            engine=engine,
        )

    @staticmethod
    def _check(config: DataConfig, max_positions: int | None) -> None:
        least = {"documents": 1, "length": 2, "batch_size": 1, "validation": 0, "workers": 0}
        for key, low in least.items():
            if getattr(config, key) < low:
                raise FalconLabError(
                    f"data.{key} is {getattr(config, key)}; it must be at least {low}"
                )
        if max_positions is not None and config.length > max_positions:
            raise FalconLabError(
                f"data.length is {config.length} tokens, but the target reads {max_positions} at "
                f"the most; set data.length={max_positions} or less"
            )

    @property
    def train_sequences(self) -> PackedSequences:
        """Return the training sequences, ``[N, T]``."""
        self.setup()
        assert self._train is not None
        return self._train

    @property
    def validation_sequences(self) -> PackedSequences:
        """Return the validation sequences, ``[N, T]``."""
        self.setup()
        assert self._validation is not None
        return self._validation

    def setup(self, stage: str | None = None) -> None:
        """Read, encode and pack the corpus, once."""
        if self._train is not None:
            return
        train = self._pack("train", self._documents())
        wanted = self.config.validation
        if wanted:
            encoded = _until(self._encoded("validation", None), wanted, self.config.length)
            self._validation = self._pack("validation", encoded).take(wanted)
        else:
            self._validation = train.take(0)
        self._train = train

    def check(self) -> None:
        """Read the documents and encode the first of them.

        Raises:
            FalconLabError: as ``setup``, as far as these show it.
        """
        found = first_documents(self.config.corpus, FIRST, self.config.seed)
        template = load_template(self.config.chat_template)
        for _ in encode_all(found, self.tokenizer, template):
            pass

    def _documents(self) -> Iterable[Encoded]:
        """Return the training documents, some continued by the target where configured."""
        config = self.config
        encoded = self._encoded("train", config.documents)
        if not config.regenerate:
            return encoded
        return regenerate(
            encoded, self._writer(), **self._continuation(), one_by_one=self.engine is not None
        )

    def unwritten_texts(self) -> TextParts | None:
        """Return the texts that the target is still to write, in parts; None where none are."""
        if not self.config.regenerate or self.engine is not None:
            return None
        return unwritten(self._encoded("train", self.config.documents), **self._continuation())

    def write_texts(self, parts: TextParts, number: int) -> None:
        """Write a part of the texts, unless it is there.

        Raises:
            FalconLabError: it cannot be written.
        """
        parts.write(number, self._writer())

    def _writer(self) -> Write:
        if self.write is None:
            raise FalconLabError("data.regenerate needs a target that writes; there is none")
        return self.write

    def _continuation(self) -> dict[str, Any]:
        """Return what decides which texts are written on, and where they are kept."""
        config = self.config
        return {
            "share": config.regenerate,
            "length": config.length,
            "seed": config.seed,
            "cache": cache_folder() / TEXTS,
            "author": self.author,
        }

    def check_server(self) -> None:
        """See that the server that writes texts runs the target, if one is to write.

        Raises:
            FalconLabError: it does not; or it does not answer, and not all texts are there already.
        """
        if self.engine is None:
            return
        from falcon_lab.serving.client import UnreachableError

        try:
            self.engine.check(self.config.length)
        except UnreachableError:
            documents = self._encoded("train", self.config.documents)
            if not is_kept(documents, **self._continuation()):
                raise

    def _encoded(self, split: str, limit: int | None) -> Iterator[Encoded]:
        config = self.config
        documents: Iterator[Document] = corpus(
            config.corpus, split=split, limit=limit, seed=config.seed
        )
        bar = Bar(documents, desc=f"encoding {split}", total=limit, unit="doc")
        return encode_all(bar, self.tokenizer, load_template(config.chat_template))

    def _pack(self, split: str, encoded: Iterable[Encoded]) -> PackedSequences:
        sequences = pack(encoded, self.config.length)
        if not len(sequences):
            raise FalconLabError(f"data.corpus {self.config.corpus}: no {split} documents in it")
        highest = int(sequences.tokens.max())
        if self.vocab_size is not None and highest >= self.vocab_size:
            raise FalconLabError(
                f"the tokenizer writes token {highest}, but the target's vocabulary has "
                f"{self.vocab_size} entries; they do not belong together"
            )
        return sequences

    def build_features(
        self,
        target: Teacher,
        announce: Callable[[str], None] = lambda line: None,
        taps: Sequence[int] = (),
    ) -> None:
        """Fill the feature store that the configuration names, and read features from it.

        Does nothing when none is named. The size is announced before anything is written.

        Args:
            target: the teacher.
            announce: is called with one line for the user.
            taps: layers whose states the drafter reads.

        Raises:
            FalconLabError: as ``plan_store`` and ``build_store``; or states that a server should
                have written are not there, or not the target's.
        """
        plans = self.plan_features(target, taps)
        for plan in plans.values():
            announce(plan.sentence)
        teacher = self.teacher(target, plans)
        for split, plan in plans.items():
            batch_size = self.config.batch_size
            sequences = self.sequences(split)
            store = build_store(plan, sequences, teacher, taps=taps, batch_size=batch_size)
            if store.index.errors:
                announce(f"feature store {plan.folder}: {store.index.error_sentence}")
            self._features[split] = store

    def sequences(self, split: str) -> PackedSequences:
        """Return the sequences of one of ``SPLITS``, ``[N, T]``."""
        return self.train_sequences if split == SPLITS[0] else self.validation_sequences

    def plan_features(self, target: Teacher, taps: Sequence[int] = ()) -> dict[str, StorePlan]:
        """Return by split what is to be written to fill the feature store, if there is one.

        Raises:
            FalconLabError: as ``plan_store``.
        """
        config = self.config
        if config.feature_store is None:
            return {}
        return {
            split: plan_store(
                Path(config.feature_store) / split,
                self.sequences(split),
                target,
                taps={*taps, *config.feature_store_taps},
                kept=config.feature_store_dtype,
            )
            for split in SPLITS
            if len(self.sequences(split))
        }

    def teacher(self, target: Any, plans: Mapping[str, StorePlan]) -> Teacher:
        """Return who gives the states that stores lack: the target, or a server's files.

        Raises:
            FalconLabError: as ``ExtractedStates.prepare``.
        """
        unfinished = [self.sequences(split) for split, plan in plans.items() if plan.missing]
        folder = self.config.extracted_states
        if folder is None or not unfinished:
            teacher: Teacher = target
            return teacher
        from falcon_lab.data.extracted import ExtractedStates

        states = ExtractedStates(target, Path(folder))
        layers = {layer for plan in plans.values() for layer in plan.index.taps}
        states.prepare(unfinished, layers)
        return states

    def token_counts(self) -> Tensor:
        """Count each token in the training answers: what the loss masks have, ``[V]`` long."""
        sequences = self.train_sequences
        answers = sequences.tokens[sequences.loss_mask].long()
        return torch.bincount(answers, minlength=self.vocab_size or 0)

    def batches(self) -> Batches:
        """Return all training batches, by number."""
        config = self.config
        features = self._features.get("train")
        return Batches(self.train_sequences, config.batch_size, config.seed, features)

    def train_dataloader(self) -> BatchStream:
        """Return this process's share of the training batches."""
        share = self._share()
        return BatchStream(self.batches(), self._length(share), share, self.config.workers)

    def val_dataloader(self) -> ValidationBatches | list[Any]:
        """Return this process's share of the validation batches."""
        if not len(self.validation_sequences):
            return []
        features = self._features.get("validation")
        return ValidationBatches(
            self.validation_sequences, self.config.batch_size, self._share(), features
        )

    def _share(self) -> Share:
        if self.trainer is None:
            return Share()
        among = self.trainer.distributed_sampler_kwargs  # those with batches of their own
        return Share() if among is None else Share(among["rank"], among["num_replicas"])

    def _length(self, share: Share) -> int:
        """Return the batches of one process in what Lightning calls an epoch."""
        trainer = self.trainer
        if trainer is not None and trainer.max_steps > 0 and trainer.max_epochs in (None, -1):
            return int(trainer.max_steps * trainer.accumulate_grad_batches)
        return -(-len(self.train_sequences) // (self.config.batch_size * share.world))


def _until(encoded: Iterator[Encoded], sequences: int, length: int) -> Iterator[Encoded]:
    """Yield the beginnings of documents until they fill so many sequences.

    One long file would not stand for its corpus, so each gives two sequences at the most.
    """
    seen, most = 0, 2 * length
    for document in encoded:
        yield Encoded(document.tokens[:most], document.loss_mask[:most])
        seen += min(len(document), most)
        if seen >= sequences * length:
            return
