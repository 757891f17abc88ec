"""openai: models, chats with choices and log-probabilities, a stream, a list of prompts, an error; many at a time."""

import asyncio
import sys

import openai

url, model = sys.argv[1:]
where = {"base_url": f"{url}/v1", "api_key": "unused"}
client = openai.OpenAI(**where)
assert model in [each.id for each in client.models.list()]

ask = {"model": model, "messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 6}
drawn = {**ask, "temperature": 1, "extra_body": {"ignore_eos": True}}  # vLLM gives several choices only if it draws
answer = client.chat.completions.create(**drawn, n=2, logprobs=True, top_logprobs=2, seed=1)
assert [len(choice.logprobs.content) for choice in answer.choices] == [6, 6], answer
assert answer.usage.completion_tokens == 12, answer
whole = client.chat.completions.create(**ask).choices[0].message.content

with client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}) as stream:
    parts = list(stream)
assert "".join(part.choices[0].delta.content or "" for part in parts[:-1]) == whole, (parts, whole)
assert parts[-1].usage.completion_tokens == 6, parts[-1]

texts = client.completions.create(model=model, prompt=["a", "b"], max_tokens=4, temperature=0, logprobs=1, echo=True)
assert [choice.index for choice in texts.choices] == [0, 1], texts
assert all(choice.text.startswith(prompt) for choice, prompt in zip(texts.choices, "ab", strict=True)), texts

try:
    client.chat.completions.create(**{**ask, "model": "no-such-model"})
except openai.NotFoundError as error:
    refused = error.message
else:
    refused = ""
assert "no-such-model" in refused, refused


async def together() -> list[str]:
    async with openai.AsyncOpenAI(**where) as many:
        answers = await asyncio.gather(*(many.chat.completions.create(**ask) for _ in range(8)))
    return [each.choices[0].message.content for each in answers]


assert asyncio.run(together()) == [whole] * 8
