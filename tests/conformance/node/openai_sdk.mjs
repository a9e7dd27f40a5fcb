// What the OpenAI SDK for Node.js makes of a gateway's answers.
//
// Owns calls of the SDK, one case each. Refuses to judge: it prints what it saw as JSON.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [, , packages, name, url, ...rest] = process.argv;
const { default: OpenAI } = await import(
  pathToFileURL(createRequire(`${packages}/`).resolve("openai")).href
);
const model = "sample";
const messages = [{ role: "user", content: "When does it open?" }];
const client = (more = {}) => new OpenAI({ baseURL: `${url}/v1`, maxRetries: 0, ...more });

const cases = {
  async chat() {
    const answer = await client().chat.completions.create({ model, messages });
    return [answer.choices[0].message.content, answer.usage.total_tokens];
  },
  async stream() {
    const chunks = await client().chat.completions.create({
      model,
      messages,
      stream: true,
      stream_options: { include_usage: true },
    });
    const parts = [];
    let usage = null;
    for await (const chunk of chunks) {
      parts.push(...chunk.choices.map((choice) => choice.delta.content).filter(Boolean));
      usage = chunk.usage ?? usage;
    }
    return [parts, usage.total_tokens];
  },
  async raw(...ids) {
    const { data, response, request_id } = await client()
      .chat.completions.create({ model, messages, cartridge_ids: ids })
      .withResponse();
    const headers = Object.fromEntries(response.headers);
    return { text: data.choices[0].message.content, headers, request_id };
  },
  async responses() {
    const whole = await client().responses.create({ model, input: "When does it open?" });
    const events = await client().responses.create({
      model,
      input: "When does it open?",
      stream: true,
    });
    const kinds = [];
    for await (const event of events) kinds.push(event.type);
    return { text: whole.output_text, kinds };
  },
  async embeddings() {
    const found = await client().embeddings.create({ model, input: ["a", "b"] });
    return found.data.map((entry) => entry.embedding);
  },
  async models() {
    const listed = [];
    for await (const entry of client().models.list()) listed.push(entry.id);
    return [listed, (await client().models.retrieve(model)).id];
  },
  async error(fields, key) {
    const more = key ? { apiKey: key } : {};
    try {
      await client(more).chat.completions.create({ model, messages, ...JSON.parse(fields) });
    } catch (raised) {
      return {
        class: raised.constructor.name,
        status: raised.status ?? null,
        code: raised.code ?? null,
        request_id: raised.requestID ?? null,
        retry_after: raised.headers?.get("retry-after") ?? null,
      };
    }
    return null;
  },
  async aborted() {
    try {
      await client({ timeout: 1000 }).chat.completions.create({ model, messages });
    } catch (raised) {
      return raised.constructor.name;
    }
    return null;
  },
};

console.log(JSON.stringify(await cases[name](...rest)));
