"""Builds a model from a configuration (of transformers or of ``zoo.modules``), by default on the meta device, with a global batch for it.

Of the model, only the parameters are on meta. Buffers, such as rotary frequencies and batch norm's statistics, are created on the CPU with
their real values, because an emitted program needs them.
"""

from __future__ import annotations

import contextlib
import itertools
import textwrap
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from autopar.data_files import shown
from autopar.errors import AutoparError, BatchError, ModelError
from autopar.precision import torch_dtype
from autopar.torch_private import byte_range, has_storage, memory, place_in_memory
from autopar.zoo.modules import MODULES, module_and_batch

_KINDS = {
    # ending of a transformers class name: kind of batch
    "LMHeadModel": "causal",
    "ForCausalLM": "causal",
    "ForMaskedLM": "masked",
    "ForConditionalGeneration": "seq2seq",
    "ForImageClassification": "image",
}
_MASKED_FRACTION = 0.15  # the fraction of tokens that a masked language model predicts (arXiv:1810.04805, section 3.1)
_SOURCE_PER_TARGET = (
    4  # a seq2seq batch has seq/4 target tokens: T5's span corruption makes 114 of 512 (arXiv:1910.10683)
)
_GLOBAL_BATCH = 8
_MAX_DEFAULT_SEQ = 2048  # tokens
_IMAGE_SIZE = 224  # pixels; the training size of convolutional classifiers, which support any size
_IGNORED = -100  # a label that the loss ignores


_INITIALISERS = frozenset(
    f"{name}_"
    for name in ("normal", "uniform", "trunc_normal", "xavier_normal", "xavier_uniform", "kaiming_normal", "kaiming_uniform",
                 "constant", "fill", "zero", "zeros", "ones")
)  # fmt: skip


_LARGE = 1 << 22  # a tensor with at least as many elements is large
_MAX_PARAMETER_TENSORS = 1 << 17


class _EmptyOnMeta(TorchFunctionMode):
    """A context in which ``torch.empty``, which allocates the parameters of torch's layers, returns meta tensors; initialisers skip meta
    tensors; and large results of ``torch.zeros`` take no memory until they are written to."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty and kwargs.get("device") is None:
            kwargs = kwargs | {"device": "meta"}
        elif func is torch.zeros and kwargs.get("device") is None:
            found = func(*args, **kwargs | {"device": "meta"})
            return _zeros(found) if found.numel() >= _LARGE else func(*args, **kwargs)
        elif getattr(func, "__name__", "") in _INITIALISERS:
            tensor = args[0] if args else kwargs.get("tensor")
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "meta":
                return tensor
        return func(*args, **kwargs)


def _zeros(like: torch.Tensor) -> torch.Tensor:
    """Return zeros with the shape and dtype of ``like``, in memory that the system allocates lazily; ``torch.zeros`` would write to it."""
    raw = torch.from_numpy(np.zeros(like.numel() * like.element_size(), np.uint8))
    return raw.view(like.dtype).view(like.shape).requires_grad_(like.requires_grad)


class _MetaParameters:
    """Replaces parameters by meta parameters; parameters that share memory share it on meta, too."""

    def __init__(self) -> None:
        # a weak reference keeps the storage's address reserved, but not its memory, so no other storage gets the same key
        self._made: dict[StorageWeakRef, tuple[torch.Tensor, dict[Any, nn.Parameter]]] = {}

    def parameter(self, given: nn.Parameter) -> nn.Parameter:
        """Return the meta parameter that replaces ``given``: the same one for all parameters over the same elements."""
        storage = given.untyped_storage()
        reference = StorageWeakRef(storage)
        if reference not in self._made:
            self._made[reference] = torch.empty(storage.nbytes(), dtype=torch.uint8, device="meta"), {}
        raw, known = self._made[reference]
        place = place_in_memory(given)
        if place not in known:
            empty = torch.empty(0, dtype=given.dtype, device="meta")
            made = empty.set_(raw.untyped_storage(), given.storage_offset(), given.shape, given.stride())
            known[place] = nn.Parameter(made, given.requires_grad)
        return known[place]

    def storage_id(self, tensor: torch.Tensor) -> int:
        """Return the id of the meta storage that replaced the tensor's storage, or else of the tensor's own storage."""
        entry = self._made.get(StorageWeakRef(tensor.untyped_storage()))
        return memory(tensor if entry is None else entry[0])


@contextlib.contextmanager
def _on_meta() -> Iterator[_MetaParameters]:
    """The context of ``_EmptyOnMeta``, in which large parameters that were created without ``torch.empty`` move to meta, too, when a module
    registers them."""
    moved = _MetaParameters()

    def move(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta or parameter.numel() < _LARGE or not has_storage(parameter):
            return None
        return moved.parameter(parameter)

    handle = register_module_parameter_registration_hook(move)  # type: ignore[arg-type]  # torch's stub omits the hook's result
    try:
        with _EmptyOnMeta():
            yield moved
    finally:
        handle.remove()


def _with_tied_parameters(model: nn.Module, moved: _MetaParameters) -> nn.Module:
    """Replace parameters over the same elements (``head.weight.data = embedding.weight.data``) by one parameter; return the model.

    Raises ``ModelError`` if a parameter shares only some of its elements with another tensor, or all of them with another
    shape, dtype or ``requires_grad``.
    """
    first: dict[Any, nn.Parameter] = {}
    by_storage: dict[int, dict[Any, tuple[str, torch.Tensor]]] = {}
    for path, module in model.named_modules():
        for name, parameter in list(module.named_parameters(path, recurse=False, remove_duplicate=False)):
            if not has_storage(parameter) or not parameter.numel():
                continue
            place, where = place_in_memory(parameter), moved.storage_id(parameter)
            known = first.setdefault((where, parameter.is_meta, place), parameter)
            if known is not parameter:
                setattr(module, name.rpartition(".")[2], known)
            by_storage.setdefault(where, {}).setdefault((parameter.is_meta, place), (name, known))
    for name, buffer in model.named_buffers():
        if has_storage(buffer) and buffer.numel() and (where := moved.storage_id(buffer)) in by_storage:
            by_storage[where][name] = name, buffer
    for tensors in by_storage.values():
        ordered = sorted((*byte_range(tensor), name) for name, tensor in tensors.values())
        for (_, end, name), (begin, _, other) in itertools.pairwise(ordered):
            if begin < end:
                raise ModelError(
                    f"{name} and {other} of the model overlap in memory but are not tied",
                    "give each its own storage, or tie full parameters of the same shape",
                )
    return model


def build_config(
    config: dict[str, Any],
    seq: int | None,
    global_batch: int | None,
    precision: str = "bfloat16",
    device: str = "meta",
) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Return the model that a transformers ``config.json`` describes, and a batch of ``global_batch`` images or sequences of ``seq``
    tokens.

    A configuration with a ``"module"`` describes a model of ``zoo.modules``.

    ``seq`` defaults to the model's maximum length, or 2,048 if that is less; ``global_batch`` to 8. On a device other than meta, parameters
    and batch have random values (the batch those of seed 0).

    Raises:
        ModelError: transformers isn't installed or can't build the model, autopar knows no batch for it, or the configuration is invalid.
        BatchError: the sequence is too short, or longer than the model's learned positions, or the batch is empty.
    """
    try:
        with _limited_parameters():
            build = _build_from_zoo if "module" in config else _build_from_transformers
            return build(config, seq, global_batch, precision, device)
    except AutoparError:
        raise
    except Exception as error:  # a file from elsewhere may have any value in any field
        raise ModelError(
            f"the configuration does not describe a model: {type(error).__name__}: {error}",
            "give the config.json that transformers saves, or the fields of a module of the zoo",
        ) from error


def _build_from_transformers(
    config: dict[str, Any], seq: int | None, global_batch: int | None, precision: str, device: str
) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    names = config.get("architectures") or ["ForCausalLM"]
    if not isinstance(names, list) or not isinstance(names[0], str):
        raise ModelError(
            f"architectures is {shown(names)}, not a list of names", "give the config.json that transformers saves"
        )
    kind = _kind(names[0])
    auto, hf_config = _resolve(config, kind)
    seq, global_batch = _check_sizes(hf_config, kind, seq, global_batch)
    dtype = torch_dtype(precision)
    model: Any = _build_module(auto, hf_config, dtype, device)
    if kind == "causal":
        model.loss_type = "ForCausalLM"  # also transformers' default for other class names, which it warns about
    return model, _batch(kind, hf_config, seq, global_batch, dtype, device)


@contextlib.contextmanager
def _limited_parameters() -> Iterator[None]:
    """A context in which modules may register at most ``_MAX_PARAMETER_TENSORS`` parameters: a million layers would take hours to build."""
    made = 0

    def count(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        nonlocal made
        made += parameter is not None
        if made > _MAX_PARAMETER_TENSORS:
            raise ModelError(
                f"the model has more than {_MAX_PARAMETER_TENSORS:,} parameter tensors, which autopar does not support",
                "check the numbers of layers and experts in the configuration",
            )

    handle = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        handle.remove()


_LAYER_COUNTS = ("num_hidden_layers", "num_layers", "encoder_layers", "decoder_layers", "num_decoder_layers", "depth")
_MAX_LAYERS = 4096


def _check_depth(hf_config: Any) -> None:
    """Raise ``ModelError`` for more than ``_MAX_LAYERS`` layers, before they are built."""
    for name in _LAYER_COUNTS:
        count = getattr(hf_config, name, None)
        if isinstance(count, int) and count > _MAX_LAYERS:
            raise ModelError(
                f"{name} is {shown(count)}, and autopar plans for {_MAX_LAYERS:,} layers at most", f"check {name}"
            )


def batch_for(
    class_name: str, hf_config: Any, seq: int | None, global_batch: int | None, dtype: torch.dtype, device: str
) -> dict[str, torch.Tensor]:
    """Return a batch for an existing transformers model. Sizes, their defaults and errors are as in ``build_config``."""
    kind = _kind(class_name)
    seq, global_batch = _check_sizes(hf_config, kind, seq, global_batch)
    return _batch(kind, hf_config, seq, global_batch, dtype, device)


def _batch(
    kind: str, hf_config: Any, seq: int, global_batch: int, dtype: torch.dtype, device: str
) -> dict[str, torch.Tensor]:
    if kind == "image":
        return _image(hf_config, global_batch, dtype, device, torch.Generator().manual_seed(0))
    made_on = "meta" if device == "meta" else "cpu"  # not the GPU: the seed gives the same batch on every device
    generator = torch.Generator().manual_seed(0) if made_on == "cpu" else None
    with torch.device(made_on):
        batch = _TEXT_BATCHES[kind](hf_config.vocab_size, global_batch, seq, generator)
    return {name: tensor.to(device) for name, tensor in batch.items()}


def _kind(class_name: str) -> str:
    for ending, kind in _KINDS.items():
        if class_name.endswith(ending):
            return kind
    raise ModelError(
        f"{class_name} is a transformers model for which autopar cannot make a batch",
        f"write a factory that returns (module, batch); classes named ...{', ...'.join(_KINDS)} are known",
    )


def _resolve(config: dict[str, Any], kind: str) -> tuple[Any, Any]:
    """Return the transformers auto class for the kind of model, and the configuration as a transformers object."""
    try:
        import transformers
    except ImportError as error:
        raise ModelError(
            "this model comes from transformers, which is not installed", "pip install 'autopar[hf]'"
        ) from error
    auto = {
        "causal": transformers.AutoModelForCausalLM,
        "masked": transformers.AutoModelForMaskedLM,
        "seq2seq": transformers.AutoModelForSeq2SeqLM,
        "image": transformers.AutoModelForImageClassification,
    }[kind]
    fields = {k: v for k, v in _without_code(config).items() if k not in ("model_type", "transformers_version")}
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise ModelError("the configuration has no model_type", "give the config.json that transformers saves")
    try:
        hf_config = transformers.AutoConfig.for_model(model_type, **fields)
    except Exception as error:  # each configuration class raises its own exceptions
        why = textwrap.shorten(str(error), 200, placeholder=" ...")  # transformers lists all of its hundreds of models
        raise ModelError(
            f"transformers {transformers.__version__} cannot read the configuration (model_type {model_type!r}): {why}",
            "give the config.json that transformers saves",
        ) from error
    _check_depth(hf_config)
    if hasattr(hf_config, "use_cache"):
        hf_config.use_cache = False
    return auto, hf_config


_CODE_FIELDS = ("auto_map", "custom_pipelines", "use_kernels", "attn_implementation", "experts_implementation")
"""Fields in which a configuration may name code: Python files of a repository, and kernels that transformers fetches and imports."""
_BUILT_IN = ("eager", "sdpa", "batched_mm", "grouped_mm")  # implementations that are part of transformers


def _without_code(value: Any) -> Any:
    """Return a configuration without the fields that name code, at any depth, because a file must not run code."""
    if isinstance(value, list):
        return [_without_code(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {key: _without_code(item) for key, item in value.items() if not _names_code(key, item)}


def _names_code(key: str, value: Any) -> bool:
    name = key.lstrip("_").removesuffix("_internal")
    return name in _CODE_FIELDS and not (isinstance(value, str) and value in _BUILT_IN)


def _build_module(auto: Any, hf_config: Any, dtype: torch.dtype, device: str) -> nn.Module:
    try:
        with _on_meta() if device == "meta" else contextlib.nullcontext(_MetaParameters()) as moved:
            model: nn.Module = auto.from_config(hf_config, dtype=dtype, trust_remote_code=False)
    except AutoparError:
        raise
    except Exception as error:  # any error that a model's code raises for inconsistent sizes
        raise ModelError(
            f"transformers cannot build the model (model_type {hf_config.model_type!r}): {error}",
            "its sizes may be inconsistent: check whether transformers can build the model without autopar",
        ) from error
    return _placed(_with_tied_parameters(model, moved), device)


def _build_from_zoo(
    config: dict[str, Any], seq: int | None, global_batch: int | None, precision: str, device: str
) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    if not isinstance(config["module"], str) or config["module"] not in MODULES:
        raise ModelError(f"there is no module {shown(config['module'])} in the zoo", f"one of {', '.join(MODULES)}")
    longest = config.get("positions")
    seq = min(longest or _MAX_DEFAULT_SEQ, _MAX_DEFAULT_SEQ) if seq is None else seq
    global_batch = _check_batch(_GLOBAL_BATCH if global_batch is None else global_batch)
    if longest and seq > longest:
        raise BatchError(
            f"the model has {longest} learned positions, but the batch has sequences of {seq} tokens",
            f"--seq takes at most {longest} here",
        )
    dtype = torch_dtype(precision)
    try:
        with _on_meta() if device == "meta" else contextlib.nullcontext(_MetaParameters()) as moved:
            module, batch = module_and_batch(config, seq, global_batch, dtype, device)
    except TypeError as error:
        raise ModelError(
            f"the configuration does not fit the module {config['module']}: {error}",
            "its keys are the module's arguments",
        ) from error
    for parameter in _with_tied_parameters(module, moved).parameters():
        parameter.data = parameter.data.to(dtype)
    return _placed(module, device), batch


def _placed(model: nn.Module, device: str) -> nn.Module:
    """Return the model on ``device``, in training mode. Only parameters move to meta, and tied parameters stay tied."""
    if device != "meta":
        return model.to(device).train()
    moved: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in moved:
                moved[id(parameter)] = nn.Parameter(parameter.data.to("meta"), parameter.requires_grad)
            setattr(module, name, moved[id(parameter)])
    return model.train()


def _check_batch(global_batch: int) -> int:
    if global_batch < 1:
        raise BatchError(f"a global batch of {global_batch} is empty", "--global-batch must be at least 1")
    return global_batch


def _check_sizes(hf_config: Any, kind: str, seq: int | None, global_batch: int | None) -> tuple[int, int]:
    global_batch = _check_batch(_GLOBAL_BATCH if global_batch is None else global_batch)
    if kind == "image":
        return 0, global_batch
    longest = getattr(hf_config, "max_position_embeddings", None) or getattr(hf_config, "n_positions", None)
    if seq is None:
        seq = min(longest or _MAX_DEFAULT_SEQ, _MAX_DEFAULT_SEQ)
    if seq < 2:
        raise BatchError(f"a sequence of {seq} tokens has no next token to learn", "--seq must be at least 2")
    # rotary and relative positions extend beyond the length that a model was trained with; a learned table of positions doesn't
    learned = hf_config.model_type in ("gpt2", "bert", "roberta", "opt", "gpt_neo")
    if learned and longest and seq > longest:
        raise BatchError(
            f"{hf_config.model_type} has {longest} learned positions, but the batch has sequences of {seq} tokens",
            f"--seq takes at most {longest} here",
        )
    return seq, global_batch


def _causal(vocabulary: int, batch: int, seq: int, g: torch.Generator | None) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, vocabulary, (batch, seq), generator=g)
    # cloned, because export makes one placeholder of a tensor that is passed twice
    return {"input_ids": ids, "labels": ids.clone()}


def _masked(vocabulary: int, batch: int, seq: int, g: torch.Generator | None) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, vocabulary, (batch, seq), generator=g)
    hidden = torch.rand((batch, seq), generator=g) < _MASKED_FRACTION
    hidden[:, 0] = True  # at least one label in every row
    return {"input_ids": ids, "labels": torch.where(hidden, ids, _IGNORED)}


def _seq2seq(vocabulary: int, batch: int, seq: int, g: torch.Generator | None) -> dict[str, torch.Tensor]:
    source = torch.randint(0, vocabulary, (batch, seq), generator=g)
    target = torch.randint(0, vocabulary, (batch, max(2, seq // _SOURCE_PER_TARGET)), generator=g)
    return {"input_ids": source, "labels": target}


_TEXT_BATCHES = {"causal": _causal, "masked": _masked, "seq2seq": _seq2seq}


def _image(config: Any, batch: int, dtype: torch.dtype, device: str, g: torch.Generator) -> dict[str, torch.Tensor]:
    size = getattr(config, "image_size", _IMAGE_SIZE)
    height, width = size if isinstance(size, (tuple, list)) else (size, size)
    shape = (batch, config.num_channels, height, width)
    # a batch of a few thousand images is gigabytes: planning reads only its shape
    pixels = (
        torch.empty(shape, dtype=dtype, device="meta")
        if device == "meta"
        else torch.randn(shape, generator=g).to(device, dtype)
    )
    return {"pixel_values": pixels, "labels": torch.randint(0, config.num_labels, (batch,), generator=g).to(device)}
