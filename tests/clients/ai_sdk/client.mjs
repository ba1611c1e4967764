// Does with Vercel's AI SDK what its first argument names, and prints the result as JSON.
// The variables SERVER_URL, SERVER_KEY and SERVER_MODEL say with which server.

import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateObject, generateText, Output, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";

globalThis.AI_SDK_LOG_WARNINGS = false; // they would be part of the output: responses not kept lose their reasoning
const [action, providerName, question, modelName = process.env.SERVER_MODEL] = process.argv.slice(1);

const connection = { baseURL: process.env.SERVER_URL, apiKey: process.env.SERVER_KEY };
const model = {
  compatible: () =>
    createOpenAICompatible({ ...connection, name: "quire", includeUsage: true, supportsStructuredOutputs: true })(
      modelName,
    ),
  openai: () => createOpenAI(connection).chat(modelName),
  responses: () => createOpenAI(connection)(modelName),
}[providerName]();

const cities = [];
const tools = {
  get_weather: tool({
    description: "Get the weather in a city.",
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => {
      cities.push(city);
      return process.env.RESULT;
    },
  }),
};
const Trip = z.object({ city: z.enum(["Paris", "Oslo"]), days: z.int().min(1).max(9), note: z.string().max(20) });
const providerOptions = providerName === "responses" ? { openai: { store: false } } : {}; // else it refers to items
const asked = { model, prompt: question, maxRetries: 0, providerOptions };

async function collect(stream) {
  const pieces = [];
  for await (const piece of stream) pieces.push(piece);
  return pieces;
}

const actions = {
  async loop() {
    const { text, finishReason, reasoning, steps } = await generateText({ ...asked, tools, stopWhen: stepCountIs(5) });
    const thoughts = steps.flatMap((step) => step.reasoning.map((part) => part.text));
    return { text, finishReason, cities, steps: steps.map((step) => step.finishReason), thoughts, reasoning };
  },
  async streamLoop() {
    const result = streamText({ ...asked, tools, stopWhen: stepCountIs(5) });
    const pieces = await collect(result.textStream);
    return { pieces, cities, usage: await result.totalUsage };
  },
  async object() {
    const { object, usage } = await generateObject({ ...asked, schema: Trip });
    return { object, usage };
  },
  async streamObject() {
    const result = streamObject({ ...asked, schema: Trip });
    const partial = await collect(result.partialObjectStream);
    return { partial, object: await result.object };
  },
  async output() {
    return { object: (await generateText({ ...asked, output: Output.object({ schema: Trip }) })).output };
  },
  async demandedCall() {
    const book = tool({ description: "Book a trip.", inputSchema: Trip });
    const { toolCalls, finishReason } = await generateText({ ...asked, tools: { book }, toolChoice: "required" });
    return { calls: toolCalls.map((call) => ({ name: call.toolName, input: call.input })), finishReason };
  },
  async error() {
    try {
      await generateText(asked);
    } catch (error) {
      return { isCallError: APICallError.isInstance(error), status: error.statusCode, message: error.message };
    }
    return {};
  },
  async streamError() {
    const errors = [];
    const result = streamText({ ...asked, onError: ({ error }) => errors.push(error) });
    await collect(result.textStream);
    return { status: errors[0]?.statusCode, message: errors[0]?.message };
  },
};

console.log(JSON.stringify(await actions[action]()));
