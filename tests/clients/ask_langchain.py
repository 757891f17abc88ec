"""langchain-openai: batches of prompts and chats, a stream, choices with log-probabilities."""

import sys

from langchain_openai import ChatOpenAI, OpenAI

url, model = sys.argv[1:]
common = {"base_url": f"{url}/v1", "api_key": "unused", "model": model, "temperature": 0, "max_tokens": 8}
chat, text = ChatOpenAI(**common), OpenAI(**common)
answers = [message.content for message in chat.batch(["hi", "there", "you"])]
assert len(answers) == 3
assert all(answers), answers
assert "".join(part.content for part in chat.stream("hi")) == answers[0]
assert len(text.batch(["a b c", "d e f"])) == 2
usage = text.generate(["x", "y", "z"]).llm_output["token_usage"]
assert usage["completion_tokens"] == 24, usage
drawn = {**common, "temperature": 1, "extra_body": {"ignore_eos": True}}  # vLLM gives several choices only if it draws
told = ChatOpenAI(**drawn, logprobs=True, top_logprobs=2, n=2).invoke("hi").response_metadata["logprobs"]["content"]
assert [len(each["top_logprobs"]) for each in told] == [2] * 8, told
