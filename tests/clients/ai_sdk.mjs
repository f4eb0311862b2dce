// The AI SDK against the demo model: `node ai_sdk.mjs http://HOST:PORT/v1`.
import assert from "node:assert/strict";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const baseURL = process.argv[2];
const openai = createOpenAI({ baseURL, apiKey: "none" });
const compatible = createOpenAICompatible({ name: "trtserve", baseURL, apiKey: "none", supportsStructuredOutputs: true, includeUsage: true });
const prompt = "What is machine learning?";
const options = { prompt, temperature: 0, maxRetries: 0, maxOutputTokens: 100 };
const city = z.enum(["Paris", "Rome"]);

for (const model of [openai.chat("demo"), openai.responses("demo"), compatible("demo")]) {
  const answer = await generateText({ model, ...options });
  assert.match(answer.text, /^\s*Machine learning/);
  const stream = streamText({ model, ...options });
  let text = "";
  for await (const piece of stream.textStream) text += piece;
  assert.equal(text, answer.text);
  assert.equal((await stream.usage).outputTokens, answer.usage.outputTokens);
  assert.ok(answer.usage.outputTokens > 0);
  const schema = z.object({ kind: z.enum(["cat", "dog"]) });
  const structured = await generateText({ model, ...options, output: Output.object({ schema }) });
  assert.ok(["cat", "dog"].includes(structured.output.kind));
  const weather = tool({ description: "Tell the weather of a city.", inputSchema: z.object({ city }), execute: async ({ city }) => `Rain in ${city}.` });
  const used = await generateText({ model, ...options, tools: { weather }, toolChoice: "required", stopWhen: stepCountIs(1) });
  assert.match(used.toolResults[0].output, /^Rain in /);
}
