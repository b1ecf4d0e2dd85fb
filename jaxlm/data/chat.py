"""The one form in which a conversation is written: ChatML, its role as one token of the vocabulary.

    </s><|im_start|><|user|>
    Hello<|im_end|>
    <|im_start|><|assistant|>
    Hi there.<|im_end|>

`TEMPLATE` is the Jinja template of an exported tokenizer. It begins with EOS, as every document does (`data.ids`), and its
`{% generation %}` marks what the assistant says, so that `return_assistant_tokens_mask` gives the mask of the loss.
"""

from jaxlm.config import CHAT_TOKENS, ConfigError
from jaxlm.data.coder import Coder

END = CHAT_TOKENS[1]

TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('a message is by system, user or assistant, not ' + message['role']) }}"
    "{% endif %}"
    "{{ '<|im_start|><|' + message['role'] + '|>\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}"
    "{{ message['content'] + '<|im_end|>\\n' }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|><|assistant|>\\n' }}{% endif %}"
)


def speaks(tokenizer: Coder) -> bool:
    """True if the vocabulary has all tokens of the template."""
    return all(_id(tokenizer, token) is not None for token in CHAT_TOKENS)


def end_id(tokenizer: Coder) -> int | None:
    """Returns the id of the token that ends a message; None if the vocabulary has none."""
    return _id(tokenizer, END)


def _id(tokenizer: Coder, token: str) -> int | None:
    try:
        return tokenizer.id_of(token)
    except ConfigError:
        return None
