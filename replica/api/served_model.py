"""What the server must know of the model it answers for. No torch."""

from __future__ import annotations

import time
from dataclasses import dataclass

from replica.api.chat import ChatTemplate
from replica.api.generation_config import GenerationDefaults, load_end_token_ids
from replica.api.reasoning import CLOSE
from replica.api.tokenizer import Tokenizer
from replica.config import ReplicaConfig
from replica.errors import ConfigError
from replica.model_config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The API's side of a checkpoint."""

    name: str
    created: int  # Unix seconds: when this replica began to serve it
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    defaults: GenerationDefaults
    end_token_ids: frozenset[int]
    max_model_len: int  # tokens, prompt and answer together
    vocab_size: int

    @classmethod
    def load(cls, config: ReplicaConfig, model_config: ModelConfig) -> ServedModel:
        """Reads tokenizer, chat template and generation config. Raises CheckpointError, ConfigError."""
        if config.max_model_len > model_config.max_model_len:
            raise ConfigError(
                f"--max-model-len is {config.max_model_len}, the checkpoint's limit is {model_config.max_model_len}"
            )
        tokenizer = Tokenizer.load(config.model)
        return cls(
            name=config.model_name,
            created=int(time.time()),
            tokenizer=tokenizer,
            chat_template=ChatTemplate.load(config.model),
            defaults=GenerationDefaults.load(config.model),
            end_token_ids=load_end_token_ids(config.model, tokenizer),
            max_model_len=config.max_model_len or model_config.max_model_len,
            vocab_size=model_config.vocab_size,
        )

    @property
    def has_reasoning(self) -> bool:
        """Whether answers may begin with reasoning that is to be split from the content."""
        return self.tokenizer.token_id(CLOSE) is not None

    @property
    def max_prompt_chars(self) -> int:
        """A text with more characters cannot fit the context, whatever its tokens."""
        return self.max_model_len * self.tokenizer.max_token_chars
