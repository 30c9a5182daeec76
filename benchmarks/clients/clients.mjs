// The requests of clients.py by OpenAI's client for Node.js and by the AI SDK. Prints a line of JSON for each.
//
//   node clients.mjs URL FOLDER PACKAGES      (PACKAGES has openai, ai, @ai-sdk/openai, @ai-sdk/openai-compatible, zod)

import fs from "node:fs";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [url, folder, packages] = process.argv.slice(2);
const find = createRequire(`${fs.realpathSync(packages)}/here.js`);
const load = async (name) => import(pathToFileURL(find.resolve(name)));
const { default: OpenAI } = await load("openai");
const { zodFunction, zodResponseFormat } = await load("openai/helpers/zod");
const { z } = await load("zod");
const ai = await load("ai");
const { createOpenAI } = await load("@ai-sdk/openai");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");

const paint = z.object({ colour: z.enum(["red", "green"]), coats: z.number().int().min(1).max(3) });
const ship = z.object({ name: z.string().max(12).nullable(), to: z.record(z.enum(["home"]), paint) });
const functions = [{ name: "weather", parameters: { type: "object", properties: {} } }];
const tools = [zodFunction({ name: "paint", parameters: paint }), zodFunction({ name: "ship", parameters: paint })];
const sky = [{ role: "user", content: "Why is the sky blue?" }];
const door = [{ role: "user", content: "Paint a door." }];
const cats = ["The cat sleeps.", "A kitten naps.", "Taxes are due in May."];
const picture = fs.readFileSync(`${folder}/usual.png`);
const shown = { type: "image_url", image_url: { url: `data:image/png;base64,${picture.toString("base64")}`, detail: "high" } };
const dot = (one, other) => one.reduce((sum, value, index) => sum + value * other[index], 0);
const alike = ([first, near, far]) => dot(first, near) > dot(first, far) + 0.2;
const all = async (stream) => {
  const found = [];
  for await (const one of stream) found.push(one);
  return found;
};

const client = new OpenAI({ baseURL: url, apiKey: "none", maxRetries: 0 });
const audio = (name = "speech.wav") => ({ model: "speech", file: fs.createReadStream(`${folder}/${name}`) });
const hear = ({ name, ...more }) => client.audio.transcriptions.create({ ...audio(name), ...more });
const greedy = { model: "chat", temperature: 0, max_tokens: 100, messages: sky };
const chat = async (more) => (await client.chat.completions.create({ ...greedy, ...more })).choices[0];
const seen = { role: "user", content: [shown, { type: "text", text: "What does <image> mean?" }] };
const allowed = { mode: "required", tools: [{ type: "function", function: { name: "ship" } }] };

// Each request: what sends it, and what holds for its answer (a text: what was heard; true: the answer is not empty), or
// what the refusal says.
const openaiNode = {
  "vtt, language is None": [() => hear({ response_format: "vtt", language: "None" }), (got) => got.replace(/.*-->.*|WEBVTT/g, "")],
  "a transcription of half a file": [() => hear({ name: "cut.wav" }), (got) => got.warnings.length && got.text.length > 20],
  "a translation in verbose_json": [
    () => client.audio.translations.create({ ...audio(), response_format: "verbose_json" }),
    (got) => got.text,
  ],
  "a streamed srt": [() => hear({ stream: true, response_format: "srt" }), "response_format srt; allowed: json, text and diarized_json"],
  "a language that there is not": [() => hear({ language: "klingon" }), "language='klingon' is not a language of Whisper; allowed: a code (en) or an English name (english)"],
  "an answer parsed by zod": [
    () => client.chat.completions.parse({ ...greedy, messages: door, response_format: zodResponseFormat(paint, "paint") }),
    (got) => paint.parse(got.choices[0].message.parsed),
  ],
  "a forced call with a record": [
    async () => {
      const parameters = z.toJSONSchema(ship);
      const tool = { type: "function", function: { name: "ship", parameters } };
      return chat({ messages: door, tools: [tool], tool_choice: "required" });
    },
    (got) => ship.parse(JSON.parse(got.message.tool_calls[0].function.arguments)),
  ],
  "a choice of allowed tools": [
    () => chat({ messages: door, tools, tool_choice: { type: "allowed_tools", allowed_tools: allowed } }),
    (got) => got.message.tool_calls.length && got.message.tool_calls.every((call) => call.function.name === "ship" && paint.parse(JSON.parse(call.function.arguments))),
  ],
  "a stop string that stays": [
    () => chat({ stop: ["sky", "blue"], include_stop_str_in_output: true }),
    (got) => /(sky|blue)$/.test(got.message.content) && got.finish_reason === "stop",
  ],
  "an image, and a text about <image>": [() => chat({ model: "vision", messages: [seen], max_tokens: 8 }), (got) => Boolean(got.finish_reason)],
  "a choice of texts, by vLLM's older name": [() => chat({ guided_choice: ["yes", "no"] }), "guided_choice is not a member of this request; give structured_outputs"],
  "functions, the older name of tools": [() => chat({ functions }), "functions is not a member of this request; give tools"],
  "a streamed prompt with logprobs": [
    async () => all(await client.completions.create({ model: "chat", prompt: "Emoji: 😀", max_tokens: 12, temperature: 0, logprobs: 1, stream: true })),
    (got) => {
      const text = got.map((one) => one.choices[0].text).join("");
      const places = got.flatMap((one) => one.choices[0].logprobs?.text_offset ?? []);
      return places.length === 12 && places.every((place, index) => place >= (places[index - 1] ?? 0)) && places.at(-1) <= [..."Emoji: 😀", ...text].length;
    },
  ],
  "a streamed response with a forced call": [
    async () =>
      all(
        await client.responses.create({
          model: "chat",
          input: "Paint a door.",
          stream: true,
          max_output_tokens: 100,
          tool_choice: "required",
          tools: [{ type: "function", name: "paint", strict: true, parameters: z.toJSONSchema(paint) }],
        }),
      ),
    (got) => paint.parse(JSON.parse(got.at(-1).response.output.find((item) => item.type === "function_call").arguments)),
  ],
};

const compatible = createOpenAICompatible({ name: "triolet", baseURL: url, supportsStructuredOutputs: true });
const openai = createOpenAI({ baseURL: url, apiKey: "none" });
const asked = { temperature: 0, maxOutputTokens: 100, maxRetries: 0 };
const painter = { paint: ai.tool({ inputSchema: paint }) };
const aiSdk = {
  "a streamed text": [async () => all(ai.streamText({ ...asked, model: compatible("chat"), messages: sky }).textStream), (got) => got.length > 3],
  "an object by zod": [
    async () => (await ai.generateText({ ...asked, model: compatible("chat"), prompt: "Paint a door.", output: ai.Output.object({ schema: paint }) })).output,
    (got) => paint.parse(got),
  ],
  "a required call": [
    () => ai.generateText({ ...asked, model: openai.chat("chat"), prompt: "Paint a door.", tools: painter, toolChoice: "required" }),
    (got) => paint.parse(got.toolCalls[0].input),
  ],
  "a transcription": [
    () => ai.experimental_transcribe({ model: openai.transcription("speech"), audio: fs.readFileSync(`${folder}/speech.wav`), maxRetries: 0 }),
    (got) => got.text,
  ],
  "vectors of texts": [() => ai.embedMany({ model: compatible.embeddingModel("vectors"), values: cats, maxRetries: 0 }), (got) => alike(got.embeddings)],
  "an image, as a response": [
    () => ai.generateText({ ...asked, model: openai("vision"), messages: [{ role: "user", content: [{ type: "image", image: picture }] }] }),
    (got) => got.usage.inputTokens > 16,
  ],
  "a second turn of a stored response": [
    async () => {
      const first = await ai.generateText({ ...asked, model: openai("chat"), messages: sky });
      return ai.generateText({ ...asked, model: openai("chat"), messages: [...sky, ...first.response.messages, ...sky] });
    },
    "this server stores no items; send the item itself, as OpenAI's clients do with store=false",
  ],
};

for (const [name, requests] of Object.entries({ "openai (Node.js)": openaiNode, "AI SDK": aiSdk })) {
  for (const [request, [send, wanted]] of Object.entries(requests)) {
    const told = { client: name, request };
    try {
      const got = await send();
      const holds = typeof wanted === "function" && wanted(got);
      Object.assign(told, { right: Boolean(holds), got: JSON.stringify(got) }, typeof holds === "string" ? { text: holds } : {});
    } catch (error) {
      const type = error.type ?? error.data?.error.type; // the AI SDK's
      const said = { message: error.message, status: error.status ?? error.statusCode ?? null, type };
      Object.assign(told, { error: said, wanted: typeof wanted === "string" ? wanted : null });
    }
    console.log(JSON.stringify(told));
  }
}
