"""The mapping document: which role is played by which model or adapter, and who learns."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Discriminator, Field, Tag

from masflow.spec.base import Fault, Spec, by_shape
from masflow.spec.names import NameList, check_names


def _roles(value: object) -> object:
    if not isinstance(value, (str, list, tuple)):
        message = f"'roles' is a list of roles, or rest; got {'null' if value is None else repr(value)}"
        raise Fault(message, code="wrong-type", fix="write [NAME, NAME] or rest")
    if isinstance(value, str) and value != "rest":
        raise Fault(f"'{value}' isn't a list of roles, nor 'rest'", code="wrong-type", fix=f"write [{value}]")
    if isinstance(value, (list, tuple)) and "rest" in value:
        raise Fault("'rest' stands alone, not in a list", code="bad-roles", fix="write 'roles: rest'")
    if isinstance(value, (list, tuple)) and not value:
        raise Fault("the list of roles is empty", code="empty", fix="name a role, or write 'rest'")
    return value


Roles = Annotated[
    Annotated[Literal["rest"], Tag("<rest>")] | Annotated[NameList, Tag("<list>")],
    Discriminator(by_shape("<rest>", "<rest>", "<list>")),
    BeforeValidator(_roles),
]
"""Role names or globs, or `rest`: every role that nothing else names."""


Either = Discriminator(by_shape("<inline>", "<name>"))


Beta = Annotated[float, Field(ge=0, lt=1)]


class Optimizer(Spec):
    """AdamW and its schedule, which follows the run's step."""

    lr: float = Field(default=1e-5, gt=0)
    betas: tuple[Beta, Beta] = (0.9, 0.99)
    weight_decay: float = Field(default=0.0, ge=0)
    eps: float = Field(default=1e-8, ge=1e-20)
    warmup_steps: int = Field(default=0, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    final_lr_frac: float = Field(default=0.0, ge=0, le=1)
    """Where the schedule ends, as a share of `lr`."""
    max_grad_norm: float = Field(default=1.0, gt=0)

    hints: ClassVar[dict[str, str]] = {
        "learning_rate": "lr",
        "warmup": "warmup_steps",
        "clip": "max_grad_norm",
    }

    @classmethod
    def faults(cls, data: dict[str, Any]) -> Iterator[Fault]:
        if cls.says(data, "final_lr_frac") and data.get("schedule", "constant") == "constant":
            message = "'final_lr_frac' belongs to a schedule that falls, and this one is constant"
            yield Fault(
                message, code="useless-key", fix="add 'schedule: linear' (or cosine)", path=("final_lr_frac",)
            )


class Lora(Spec):
    """Adapter shape (PEFT)."""

    rank: int = Field(default=16, ge=1)
    alpha: float = Field(default=32.0, gt=0)
    targets: Annotated[
        Annotated[NameList, Tag("<list>")] | Annotated[Literal["all-linear"], Tag("<word>")],
        Discriminator(by_shape("<word>", "<word>", "<list>")),
    ] = "all-linear"


class Wordpiece(Spec):
    """A WordPiece vocabulary of whole words and single characters, made from files of JSON Lines (`text`)."""

    files: tuple[str, ...]
    whole_words: bool = True
    size: int | None = None


class TokenizerSpec(Spec):
    wordpiece: Wordpiece


class BaseInit(Spec):
    embedding_std: float | None = Field(default=None, gt=0)


class ConfigBase(Spec):
    """A small model made from a config, once a seed, in the run's folder."""

    config: dict[str, Any]
    """Keyword arguments of the Hugging Face config class of `model_type`."""
    init: BaseInit = BaseInit()
    freeze: tuple[Literal["embeddings"], ...] = ()
    tokenizer: Annotated[Annotated[str, Tag("<name>")] | Annotated[TokenizerSpec, Tag("<inline>")], Either]
    """How to make one, or a folder or id to load."""


class Adapter(Spec):
    """One adapter of a model and what it has of its own; a list of roles, or `rest`, is the short form."""

    roles: Roles
    per: Literal["role"] | None = None
    """An adapter for each of these roles, all with these settings."""
    optimizer: Optimizer | None = None
    """As a whole; default: the model's."""
    lora: Lora | None = None
    """As a whole; default: the model's."""
    init: str | None = None
    """`RUN` or `RUN@step`: start from an adapter of an earlier run; default: the model's `init`."""

    hints: ClassVar[dict[str, str]] = {
        "role": "roles",
        "lr": "optimizer: {lr: …}",
        "rank": "lora: {rank: …}",
    }

    @classmethod
    def longhand(cls, data: Any) -> Any:
        return data if isinstance(data, (dict, Spec)) else {"roles": data}


OF_AN_ADAPTER = ("optimizer", "lora", "init")
"""What stands at a model for all of its adapters, or at an adapter."""


SENT = ("model", "messages", "temperature", "top_p", "top_k", "max_tokens", "stop", "seed", "stream", "n")
"""Fields of a request's body that the role's sampling, or the protocol, decides."""
REMOVABLE = ("temperature", "top_p", "top_k", "seed")


class Endpoint(Spec):
    """An OpenAI-compatible server that plays frozen roles; a URL alone is the short form."""

    url: str
    """Up to and with `/v1`."""
    key_env: str | None = None
    """The environment variable that holds the key; default: OPENAI_API_KEY where it is set, over https or to
    this machine. The key itself never stands in a document, a plan or a trace."""
    max_concurrent: int = Field(default=16, ge=1)
    """Requests in flight."""
    per_minute: int | None = Field(default=None, ge=1)
    """Requests a minute, at most; a retry counts."""
    retries: int = Field(default=4, ge=0)
    """After a refused connection, a time-out, 429 or a server error, with growing pauses."""
    timeout_s: float = Field(default=120.0, gt=0)
    """Of one try."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further fields of each request's body; null leaves out one that the server doesn't know (`seed`)."""

    hints: ClassVar[dict[str, str]] = {
        "key": "key_env: NAME_OF_A_VARIABLE",
        "api_key": "key_env: NAME_OF_A_VARIABLE",
        "base_url": "url",
        "timeout": "timeout_s",
        "max_retries": "retries",
    }

    @classmethod
    def longhand(cls, data: Any) -> Any:
        return {"url": data} if isinstance(data, str) else data

    @classmethod
    def faults(cls, data: dict[str, Any]) -> Iterator[Fault]:
        url, name, options = data.get("url"), data.get("key_env"), data.get("options")
        if isinstance(url, str):
            yield from (Fault(m, code="bad-endpoint", fix=f, path=("url",)) for m, f in _url_faults(url))
        if isinstance(name, str) and not re.fullmatch(r"[A-Z_][A-Z0-9_]*", name):
            message = "'key_env' is the name of an environment variable, in capitals, never a key itself"
            fix = "put the key into a variable and write its name, e.g. key_env: JUDGE_KEY"
            yield Fault(message, code="bad-endpoint", fix=fix, path=("key_env",))
        for key, value in options.items() if isinstance(options, dict) else ():
            if re.search(r"api[_-]?key|authorization|token\Z|password|secret", str(key), re.IGNORECASE):
                message = f"'{key}' looks like a credential, which never stands in a document"
                fix = "put it into an environment variable and name that in 'key_env'"
                yield Fault(message, code="bad-endpoint", fix=fix, path=("options", key))
            elif key in SENT and not (value is None and key in REMOVABLE):
                message = f"'{key}' of a request is decided by the role's sampling and reply, or by masflow"
                fix = f"remove it from 'options'{' (null leaves it out)' if key in REMOVABLE else ''}"
                yield Fault(message, code="bad-endpoint", fix=fix, path=("options", key))


def _url_faults(url: str) -> Iterator[tuple[str, str]]:
    """(message, fix); a password in the URL is never repeated."""
    example = "write it up to and with /v1, e.g. http://localhost:8000/v1"
    try:
        parts = urlsplit(url)
        port_is_odd = parts.port == 0 or re.search(r"\s", url) is not None
    except ValueError:
        yield "'url' can't be read as an address", example
        return
    if parts.scheme not in ("http", "https") or not parts.hostname or port_is_odd:
        yield "'url' must begin with http:// or https:// and name a host", example
    elif "@" in parts.netloc:
        message = "'url' holds a user or a password, and documents and plans hold no credentials"
        yield message, "remove what stands before '@'; a key goes into the variable that 'key_env' names"
    elif parts.query or parts.fragment:
        yield "'url' goes on after its path with '?' or '#'", example
    elif parts.path.rstrip("/").endswith(("/completions", "/chat")):
        yield "'url' names one of the server's services; masflow adds /chat/completions itself", example


_TEMPLATES_OWN = frozenset({"messages", "tools", "add_generation_prompt", "enable_thinking", "tokenize"})


class Chat(Spec):
    """How messages become a prompt, where the base's own chat template needs to be told."""

    thinking: bool | None = None
    """Whether the model thinks before it replies (`enable_thinking` of a template); default: the template's.
    A thought counts in `max_tokens`, is trained, and is no part of the reply's value."""
    template: str | None = None
    """A Jinja file instead of the template of the base."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further variables of the template. `date_string` is a fixed day unless it is given here."""
    tools: Literal["auto", "template", "text"] = "auto"
    """Who describes a ReAct role's tools and reads its calls: the chat template, in the model's own form, or
    masflow in plain text. `auto`: the template where it knows tools and can be read before the model is
    loaded (the base is a folder, or `template` is given), unless the base is made from a config."""

    @classmethod
    def faults(cls, data: dict[str, Any]) -> Iterator[Fault]:
        options = data.get("options")
        for key in options if isinstance(options, dict) else ():
            if key in _TEMPLATES_OWN:
                message = f"'{key}' is what masflow itself tells the template"
                fix = "write 'thinking: …'" if key == "enable_thinking" else f"remove '{key}'"
                yield Fault(message, code="reserved-name", fix=fix, path=("options", key))


def _given(adapter: Any, key: str) -> bool:
    if isinstance(adapter, Adapter):
        return getattr(adapter, key) is not None
    return isinstance(adapter, dict) and adapter.get(key) is not None


class Model(Spec):
    """One physical model (or, with `per: role`, one a role)."""

    roles: Roles
    per: Literal["role"] | None = None
    base: Annotated[Annotated[str, Tag("<name>")] | Annotated[ConfigBase, Tag("<inline>")], Either] | None = (
        None
    )
    """A folder, a Hugging Face id, or a config; default: the experiment's `base`."""
    train: Literal["full", "lora", "frozen"] = "full"
    lora: Lora = Lora()
    adapters: (
        Annotated[
            Annotated[Literal["per_role"], Tag("<word>")]
            | Annotated[dict[str, Adapter], check_names("adapter", some=True), Tag("<groups>")],
            Discriminator(by_shape("<groups>", "<word>")),
        ]
        | None
    ) = None
    """With `train: lora`: one adapter a role, or by group, each with settings of its own where it has some;
    default: one adapter."""
    optimizer: Optimizer | None = None
    """As a whole; default: the experiment's."""
    init: str | None = None
    """`RUN` or `RUN@step`: start from an earlier run's policy."""
    context: int | None = Field(default=None, ge=8)
    """Window in tokens; default: what the base says."""
    dtype: Literal["float32", "bfloat16", "auto"] = "auto"
    chat: Chat = Chat()
    quantize: Literal["4bit"] | None = None
    """Hold the base in 4 bits (bitsandbytes, on a GPU) under adapters or frozen."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass: less memory, about a third more time."""
    endpoint: Endpoint | None = None
    """Play the roles by a server instead of a base; they are frozen."""
    model: str | None = None
    """With `endpoint`: the model's name there."""

    hints: ClassVar[dict[str, str]] = {
        "role": "roles",
        "lr": "optimizer: {lr: …}",
        "rank": "lora: {rank: …}",
    }

    @classmethod
    def faults(cls, data: dict[str, Any]) -> Iterator[Fault]:
        lora = data.get("train") == "lora"
        for key in ("lora", "adapters"):
            if cls.says(data, key) and not lora:
                message = (
                    f"'{key}' belongs to 'train: lora'; this model is trained {data.get('train', 'full')}"
                )
                yield Fault(
                    message, code="useless-key", fix=f"add 'train: lora', or remove '{key}'", path=(key,)
                )
        if data.get("quantize") is not None and data.get("train", "full") == "full":
            message = "weights in 4 bits can't be trained themselves"
            fix = "write 'train: lora' (or frozen), or remove 'quantize'"
            yield Fault(message, code="bad-quantize", fix=fix, path=("quantize",))
        if data.get("quantize") is not None and cls.says(data, "dtype"):
            message = "the base is held in 4 bits, its other weights in bfloat16, and adapters in float32"
            yield Fault(message, code="useless-key", fix="remove 'dtype'", path=("dtype",))
        if data.get("train") == "frozen" and cls.says(data, "gradient_checkpointing"):
            message = "a frozen model has no backward pass"
            fix = "remove 'gradient_checkpointing'"
            yield Fault(message, code="useless-key", fix=fix, path=("gradient_checkpointing",))
        yield from cls._endpoint_faults(data)
        yield from cls._adapter_faults(data)
        yield from cls._freeze_faults(data)
        if data.get("train") == "frozen" and data.get("optimizer") is not None:
            message = "a frozen model has no optimizer"
            yield Fault(message, code="useless-key", fix="remove 'optimizer'", path=("optimizer",))
        if data.get("per") == "role" and data.get("adapters") is not None:
            message = "'per: role' makes a model a role; 'adapters' shares one"
            yield Fault(
                message, code="per-and-adapters", fix="remove 'per' or 'adapters'", path=("adapters",)
            )

    @classmethod
    def _adapter_faults(cls, data: dict[str, Any]) -> Iterator[Fault]:
        """What all adapters have of their own leaves nothing to the model's."""
        adapters = data.get("adapters")
        if not isinstance(adapters, dict) or not adapters:
            return
        for key in OF_AN_ADAPTER:
            if cls.says(data, key) and all(_given(one, key) for one in adapters.values()):
                message = f"every adapter has its own '{key}', so the model's has no effect"
                yield Fault(message, code="useless-key", fix=f"remove '{key}' here", path=(key,))

    @classmethod
    def _freeze_faults(cls, data: dict[str, Any]) -> Iterator[Fault]:
        base = data.get("base")
        if data.get("train") == "frozen" and isinstance(base, dict) and base.get("freeze"):
            message = "all of a frozen model stays as it is"
            yield Fault(message, code="useless-key", fix="remove 'freeze'", path=("base", "freeze"))

    @classmethod
    def _endpoint_faults(cls, data: dict[str, Any]) -> Iterator[Fault]:
        if data.get("endpoint") is None:
            if data.get("model") is not None:
                message = "'model' is the name of a model at an endpoint, and this model has none"
                fix = "write 'base:' for a folder or id, or add 'endpoint: URL'"
                yield Fault(message, code="useless-key", fix=fix, path=("model",))
            return
        if not data.get("model"):
            message = "an endpoint needs the name of its model"
            yield Fault(message, code="missing-key", fix="add 'model: NAME'", path=("endpoint",))
        if data.get("train", "frozen") != "frozen":
            message = "a model behind an endpoint is frozen; its weights are elsewhere"
            yield Fault(message, code="endpoint-trains", fix="write 'train: frozen'", path=("train",))
        own = ("base", "lora", "adapters", "optimizer", "init", "context", "dtype", "chat", "quantize")
        for key in (*own, "gradient_checkpointing"):
            if cls.says(data, key):
                message = f"'{key}' belongs to a model that masflow loads; this one is behind an endpoint"
                yield Fault(message, code="useless-key", fix=f"remove '{key}'", path=(key,))


class Mapping(Spec):
    """A whole mapping."""

    models: Annotated[dict[str, Model], check_names("model", some=True)]
