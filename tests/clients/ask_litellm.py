"""litellm: chats with choices, a list of prompts, a stream."""

import sys

import litellm

url, model = sys.argv[1:]
where = {"api_base": f"{url}/v1", "api_key": "unused", "max_tokens": 5, "temperature": 0}
ask = {**where, "model": f"openai/{model}", "messages": [{"role": "user", "content": "hi"}]}
drawn = {**ask, "temperature": 1, "extra_body": {"ignore_eos": True}}  # vLLM gives several choices only if it draws
answer = litellm.completion(**drawn, n=2, logprobs=True, top_logprobs=1, presence_penalty=0.5)
assert (len(answer.choices), answer.usage.completion_tokens) == (2, 10), answer
whole = litellm.completion(**ask).choices[0].message.content
parts = [part.choices[0].delta.content or "" for part in litellm.completion(**ask, stream=True)]
assert "".join(parts) == whole, (parts, whole)
answer = litellm.text_completion(**where, model=f"text-completion-openai/{model}", prompt=["a", "b"])
assert len(answer.choices) == 2, answer
