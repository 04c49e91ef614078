// `node ai_sdk.mjs URL KEY`: one loop of an agent with a tool, with each provider of the AI SDK.

import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, tool } from "ai";
import { z } from "zod";

const [url, apiKey] = process.argv.slice(2);
const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey });
const models = [
  openai("policy"),
  openai.chat("policy"),
  createOpenAICompatible({ name: "streamrl", baseURL: `${url}/v1`, apiKey })("policy"),
  createAnthropic({ baseURL: `${url}/v1`, apiKey })("policy"),
];
const add = tool({
  description: "Adds two numbers.",
  inputSchema: z.object({ a: z.number(), b: z.number() }),
  execute: async ({ a, b }) => a + b,
});

for (const [number, model] of models.entries()) {
  const messages = [{ role: "user", content: `What is 1+2? Use the tool. (${number})` }];
  for (const question of ["Thank you. Is that right?", null]) {
    const answer = await generateText({
      model,
      messages,
      tools: { add },
      stopWhen: stepCountIs(4),
      maxOutputTokens: 500,
    });
    messages.push(...answer.response.messages);
    if (question) messages.push({ role: "user", content: question });
  }
}
