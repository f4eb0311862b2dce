"""A program for each client of `make clients`, run in its environment: `python programs.py NAME URL TOKENIZER`.

It imports nothing of trtserve. Each program uses its client as the client's own documentation does, and fails where the
answer is not the demo model's.
"""

# Without `from __future__ import annotations`: clients read the types of tools.
import asyncio
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypedDict

from pydantic import BaseModel

QUESTION = "What is machine learning?"
MODEL = "demo"
TOOL: dict[str, Any] = {
    "name": "weather",
    "description": "Tell the weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


class Animal(BaseModel):
    kind: Literal["cat", "dog"]
    legs: Literal[2, 4]


class Messages(TypedDict):
    model: str
    messages: Any


ASKED: Messages = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}]}


def check(text: object) -> None:
    """The demo model answers word for word; a client may cut white space."""
    assert str(text).strip().startswith("Machine learning"), text


def openai_chat(url: str, tokenizer: str) -> None:
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    answer = client.chat.completions.create(**ASKED, temperature=0)
    check(answer.choices[0].message.content)
    chunks = list(
        client.chat.completions.create(**ASKED, temperature=0, stream=True, stream_options={"include_usage": True})
    )
    assert "".join(each.choices[0].delta.content or "" for each in chunks[:-1]) == answer.choices[0].message.content
    assert chunks[-1].usage == answer.usage
    parsed = client.chat.completions.parse(**ASKED, response_format=Animal)
    assert isinstance(parsed.choices[0].message.parsed, Animal)
    tools: Any = [{"type": "function", "function": TOOL}]
    called = client.chat.completions.create(**ASKED, tools=tools, tool_choice="required").choices[0].message
    (call,) = called.tool_calls or []
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
    history: Any = [*ASKED["messages"], called, {"role": "tool", "tool_call_id": call.id, "content": "Rain."}]
    assert client.chat.completions.create(model=MODEL, messages=history, tools=tools).choices[0].message.content


def openai_responses(url: str, tokenizer: str) -> None:
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    answer = client.responses.create(model=MODEL, input=QUESTION, temperature=0)
    check(answer.output_text)
    with client.responses.stream(model=MODEL, input=QUESTION, temperature=0) as stream:
        assert any(event.type == "response.output_text.delta" for event in stream)
        last = stream.get_final_response()
    assert (last.output_text, last.usage) == (answer.output_text, answer.usage)
    parsed = client.responses.parse(model=MODEL, input=QUESTION, text_format=Animal)
    assert isinstance(parsed.output_parsed, Animal)
    tool: Any = {"type": "function", "strict": True, **TOOL}
    called = client.responses.create(model=MODEL, input=QUESTION, tools=[tool], tool_choice="required")
    (call,) = called.output
    assert call.type == "function_call"
    assert json.loads(call.arguments)["city"] in ("Paris", "Rome")
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "Rain."}
    after = client.responses.create(model=MODEL, input=[result], previous_response_id=called.id)
    assert after.output_text


def anthropic(url: str, tokenizer: str) -> None:
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    answer = client.messages.create(**ASKED, max_tokens=100)
    check(answer.content[0].text)
    with client.messages.stream(**ASKED, max_tokens=100) as stream:
        check("".join(stream.text_stream))
        assert stream.get_final_message().usage == answer.usage
    tool: Any = {"name": TOOL["name"], "description": TOOL["description"], "input_schema": TOOL["parameters"]}
    called = client.messages.create(**ASKED, max_tokens=100, tools=[tool], tool_choice={"type": "any"})
    assert called.content[-1].input["city"] in ("Paris", "Rome")
    assert client.messages.count_tokens(**ASKED).input_tokens == answer.usage.input_tokens


def langchain(url: str, tokenizer: str) -> None:
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    @tool
    def weather(city: Literal["Paris", "Rome"]) -> str:
        """Tell the weather of a city."""
        return f"Rain in {city}."

    model = ChatOpenAI(model=MODEL, base_url=f"{url}/v1", api_key="none", temperature=0, stream_usage=True)
    answer = model.invoke(QUESTION)
    check(answer.content)
    chunks = list(model.stream(QUESTION))
    assert "".join(str(each.content) for each in chunks) == answer.content
    assert answer.usage_metadata in [each.usage_metadata for each in chunks]
    assert isinstance(model.with_structured_output(Animal).invoke(QUESTION), Animal)
    (call,) = model.bind_tools([weather], tool_choice="any").invoke(QUESTION).tool_calls
    assert weather.invoke(call).content.startswith("Rain in ")
    responses = ChatOpenAI(model=MODEL, base_url=f"{url}/v1", api_key="none", temperature=0, use_responses_api=True)
    check(responses.invoke(QUESTION).text)


def llama_index(url: str, tokenizer: str) -> None:
    from llama_index.core.llms import ChatMessage
    from llama_index.core.prompts import PromptTemplate
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    def weather(city: Literal["Paris", "Rome"]) -> str:
        """Tell the weather of a city."""
        return f"Rain in {city}."

    options = {"is_chat_model": True, "is_function_calling_model": True, "should_use_structured_outputs": True}
    model = OpenAILike(model=MODEL, api_base=f"{url}/v1", api_key="none", temperature=0, max_retries=0, **options)
    message = ChatMessage(role="user", content=QUESTION)
    check(model.chat([message]).message.content)
    check("".join(each.delta or "" for each in model.stream_chat([message])))
    assert isinstance(model.structured_predict(Animal, PromptTemplate(QUESTION)), Animal)
    tools = [FunctionTool.from_defaults(weather)]
    called = model.chat_with_tools(tools, user_msg=QUESTION, tool_required=True)
    (call,) = model.get_tool_calls_from_response(called)
    assert call.tool_kwargs["city"] in ("Paris", "Rome")


def pydantic_ai(url: str, tokenizer: str) -> None:
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    chat = OpenAIChatModel(MODEL, provider=provider)

    async def ask() -> None:
        for model in (chat, OpenAIResponsesModel(MODEL, provider=provider)):
            agent = Agent(model, model_settings={"temperature": 0})
            answer = await agent.run(QUESTION)
            check(answer.output)
            async with agent.run_stream(QUESTION) as stream:
                assert await stream.get_output() == answer.output
                assert stream.usage.output_tokens == answer.usage.output_tokens > 0
        outputs: tuple[Any, ...] = (Animal, NativeOutput(Animal))
        for output in outputs:
            found = await Agent(chat, output_type=output).run(QUESTION)
            assert isinstance(found.output, Animal)

    asyncio.run(ask())


def instructor(url: str, tokenizer: str) -> None:
    import anthropic
    import instructor
    import openai

    asked: Any = {**ASKED, "response_model": Animal, "max_retries": 1}
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key="none"), mode=mode)
        assert isinstance(client.chat.completions.create(**asked), Animal)
        assert isinstance([*client.chat.completions.create_partial(**asked)][-1], Animal)
    other = instructor.from_anthropic(anthropic.Anthropic(base_url=url, api_key="none"))
    assert isinstance(other.chat.completions.create(**asked, max_tokens=100), Animal)


def litellm(url: str, tokenizer: str) -> None:
    import litellm

    for provider, base in (("openai", f"{url}/v1"), ("anthropic", url), ("ollama_chat", url)):
        asked: Any = {**ASKED, "model": f"{provider}/{MODEL}", "api_base": base, "api_key": "none", "temperature": 0}
        answer = litellm.completion(**asked, max_tokens=100)
        check(answer.choices[0].message.content)
        assert answer.usage.completion_tokens > 0
        stream = litellm.completion(**asked, max_tokens=100, stream=True)
        check("".join(each.choices[0].delta.content or "" for each in stream))
    asked = {**ASKED, "model": f"openai/{MODEL}", "api_base": f"{url}/v1", "api_key": "none"}
    tools = [{"type": "function", "function": TOOL}]
    (call,) = litellm.completion(**asked, tools=tools, tool_choice="required").choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")


def ollama(url: str, tokenizer: str) -> None:
    import ollama

    client = ollama.Client(host=url)
    assert [each.model for each in client.list().models] == [MODEL]
    answer = client.chat(**ASKED)
    check(answer.message.content)
    chunks = list(client.chat(**ASKED, stream=True))
    assert "".join(each.message.content or "" for each in chunks) == answer.message.content
    assert chunks[-1].eval_count == answer.eval_count
    check(client.generate(model=MODEL, prompt=QUESTION).response)
    found = client.chat(**ASKED, format=Animal.model_json_schema())
    Animal.model_validate_json(found.message.content or "")


def guidellm(url: str, tokenizer: str) -> None:
    """Its command line; the report counts every request and no error."""
    from guidellm.__main__ import cli

    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        options = {
            "backend": f"kind=openai_http,target={url},model={MODEL}",
            "profile": "kind=concurrent,streams=2",
            "constraint": "kind=max_requests,count=4",
            "tokenizer": f"kind=huggingface_auto,model={tokenizer}",
            "data": "kind=synthetic_text,prompt_tokens=16,output_tokens=8",
            "output": f"kind=json,path={report}",
        }
        arguments = [each for name, value in options.items() for each in (f"--{name}", value)]
        cli.main(["run", *arguments, "--disable-progress"], standalone_mode=False)
        (benchmark,) = json.loads(report.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (4, 0), totals


def lm_eval(url: str, tokenizer: str) -> None:
    """A task with choices, which reads the log-probabilities of prompts, and one that generates."""
    from lm_eval import simple_evaluate

    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "data.json")
        data.write_text(json.dumps({"question": QUESTION, "answer": "Machine learning"}) + "\n")
        common = {
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": folder},
            "test_split": "test",
            "doc_to_text": "{{question}}\n",
            "metadata": {"version": 1},
        }
        choices = {
            **common,
            "task": "choices",
            "output_type": "multiple_choice",
            "doc_to_choice": ["Machine learning", "xyz"],
            "doc_to_target": 0,
            "metric_list": [{"metric": "acc"}],
        }
        generated = {
            **common,
            "task": "generated",
            "output_type": "generate_until",
            "doc_to_target": "{{answer}}",
            "generation_kwargs": {"until": ["\n"], "max_gen_toks": 20},
            "metric_list": [{"metric": "exact_match"}],
        }
        options = f"model={MODEL},base_url={url}/v1/completions,tokenizer={tokenizer}"
        found = simple_evaluate("local-completions", options, tasks=[choices, generated], bootstrap_iters=0)
    assert found["results"]["choices"]["acc,none"] == 1.0
    assert found["samples"]["generated"][0]["resps"][0][0]


def mini_swe_agent(url: str, tokenizer: str) -> None:
    """An agent that works through calls of a shell; the shell here only notes them."""
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.models.litellm_model import LitellmModel

    class Shell:
        def __init__(self) -> None:
            self.commands: list[str] = []

        def execute(self, action: Any, cwd: str = "") -> dict[str, object]:
            self.commands.append(action["command"])
            return {"output": "done", "returncode": 0, "exception_info": ""}

        def get_template_vars(self, **_: object) -> dict[str, object]:
            return {}

        def serialize(self) -> dict[str, object]:
            return {}

    options = {"api_base": f"{url}/v1", "api_key": "none", "max_tokens": 60, "tool_choice": "required"}
    model = LitellmModel(model_name=f"openai/{MODEL}", model_kwargs=options, cost_tracking="ignore_errors")
    shell = Shell()
    texts = {"system_template": "Use the shell.", "instance_template": "{{task}}"}
    ended = DefaultAgent(model, shell, step_limit=3, max_consecutive_format_errors=0, **texts).run("List the files.")
    assert ended["exit_status"] == "LimitsExceeded", ended
    assert shell.commands


PROGRAMS: dict[str, Callable[[str, str], None]] = {
    each.__name__: each
    for each in (
        openai_chat,
        openai_responses,
        anthropic,
        langchain,
        llama_index,
        pydantic_ai,
        instructor,
        litellm,
        ollama,
        guidellm,
        lm_eval,
        mini_swe_agent,
    )
}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](*sys.argv[2:])
