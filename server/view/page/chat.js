/** The box to chat: a conversation with a model that generates text, with images where it reads them. */

import { askJson, keep, kept, newRequestName, reasonOf } from "./api.js";
import { byId, copyButton, element, tellProblem, write } from "./dom.js";
import { eventsOf } from "./event_reader.js";
import { plural, rate, seconds } from "./format.js";
import { rendered } from "./markdown.js";
import { offer } from "./models.js";
import { takeDrops } from "./speech.js";

const PARTS = [
  "model",
  "log",
  "problem",
  "form",
  "images",
  "images-pick",
  "file",
  "text",
  "tokens",
  "temperature",
  "clear",
  "send",
];

const CHAT_PLACE = "triolet-chat";
const MOST_NAMED = 40; // characters of a question, in the name of its lane
const NEAR = 40; // pixels: so near to its end a conversation follows what is written

export class Chat {
  /** `failed` is told the model, the id of the request and the reason of a failure. */
  constructor(models, failed) {
    this.failed = failed;
    for (const name of PARTS) this[name.replace("-", "_")] = byId(`chat-${name}`);
    this.models = models;
    this.messages = kept(CHAT_PLACE); // role, text and images; of an answer its model and the words about it, too
    this.added = []; // images of the next message
    models.listeners.push((all) => this.#offer(all));
    this.model.addEventListener("change", () => this.#offer(models.models));
    this.form.addEventListener("submit", (event) => this.#submit(event));
    this.text.addEventListener("keydown", (event) => this.#sendByKey(event));
    this.clear.addEventListener("click", () => this.#begin());
    this.file.addEventListener("change", () => this.#addAll([...this.file.files]));
    takeDrops(byId("chat"), (files) => this.#addAll(files));
    stayAtEnd(this.log);
    const isUnanswered = this.messages.at(-1)?.role === "user"; // the page was loaded anew while the answer was written
    if (isUnanswered) this.#putBack(this.messages.pop());
    for (const one of this.messages) this.#recall(one);
  }

  #keep() {
    keep(CHAT_PLACE, this.messages, 2); // a question and its answer
  }

  #recall(message) {
    const said = this.#say(message);
    if (message.role === "assistant") new Answer(said, this.log, message.text, message.thought).end(message.words);
  }

  #offer(all) {
    offer(this.model, all, "chat");
    this.images_pick.hidden = !this.#seesImages();
  }

  #seesImages() {
    return this.models.models?.get(this.model.value)?.can?.includes("image") ?? false;
  }

  #begin() {
    this.messages = [];
    this.#keep();
    this.log.replaceChildren();
    this.#setImages([]);
    tellProblem(this.problem, null);
    this.text.focus();
  }

  // -- images --------------------------------------------------------------------------------------------------------

  async #addAll(files) {
    const images = files.filter((file) => file.type.startsWith("image/"));
    const fault = !this.#seesImages()
      ? `${this.model.value || "This model"} reads no images.`
      : images.length < files.length
        ? "Only images can be added here."
        : null;
    tellProblem(this.problem, fault);
    if (this.#seesImages()) this.#setImages([...this.added, ...(await Promise.all(images.map(addressOf)))]);
    this.file.value = "";
  }

  #setImages(images) {
    this.added = images;
    this.images.hidden = !images.length;
    this.images.replaceChildren(...images.map((address, index) => this.#thumb(address, index)));
  }

  #thumb(address, index) {
    const remove = () => this.#setImages(this.added.filter((_, other) => other !== index));
    const image = element("img", { src: address, alt: `Image ${index + 1}` });
    return element("button", { type: "button", className: "thumb", title: "Remove", on: { click: remove } }, image);
  }

  // -- asking --------------------------------------------------------------------------------------------------------

  #sendByKey(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!this.control) this.form.requestSubmit();
  }

  #submit(event) {
    event.preventDefault();
    if (this.control) return this.control.abort(); // the button says so
    const text = this.text.value.trim();
    if (text || this.added.length) this.#ask(text);
  }

  async #ask(text) {
    const images = this.added;
    const [question, model] = [{ role: "user", text, images }, this.model.value];
    this.messages.push(question);
    this.#keep();
    this.#say(question);
    this.text.value = "";
    this.#setImages([]);
    tellProblem(this.problem, null);
    const answer = { role: "assistant", model };
    const isAnswered = await this.#answer(question, answer, new Answer(this.#say(answer), this.log));
    if (isAnswered) this.#keep();
    else this.#takeBack(question);
  }

  /** Whether there is an answer, or a part of one. */
  async #answer({ text }, message, answer) {
    const [id, pace] = [newRequestName(text.slice(0, MOST_NAMED) || "Images"), new Pace()];
    this.#run(new AbortController());
    try {
      for await (const told of this.#told(id, message.model, this.control.signal)) {
        pace.hear(told);
        answer.hear(told);
      }
    } catch (error) {
      const reason = reasonOf(error);
      tellProblem(this.problem, reason);
      if (reason !== null) this.failed(message.model, id, reason);
      if (!answer.text && !answer.thought) return false;
    } finally {
      this.#run(null);
      Object.assign(message, { text: answer.text, thought: answer.thought, words: pace.words() });
      answer.end(message.words);
    }
    this.messages.push(message);
    return true;
  }

  /** From now on an answer is written, which `control` stops; none where it is null. */
  #run(control) {
    this.control = control;
    write(this.send, control ? "Stop" : "Send");
    this.clear.disabled = control !== null;
    this.log.setAttribute("aria-busy", String(control !== null)); // it is read out when it is whole
  }

  /** A question without an answer can be asked again. */
  #takeBack(question) {
    this.messages.pop();
    this.log.lastElementChild.remove();
    this.log.lastElementChild.remove();
    this.#putBack(question);
  }

  #putBack({ text, images }) {
    this.text.value ||= text;
    if (!this.added.length) this.#setImages(images);
  }

  async *#told(id, model, signal) {
    const body = {
      model,
      messages: this.messages.map((one) => ({
        role: one.role,
        content: contentOf(one),
        reasoning_content: one.thought || undefined, // the model's chat template decides what is read of it
      })),
      max_completion_tokens: this.tokens.valueAsNumber,
      temperature: this.temperature.valueAsNumber,
      stream: true,
      stream_options: { include_usage: true },
    };
    const response = await askJson("v1/chat/completions", body, {
      headers: { "x-request-id": id },
      signal,
    });
    for await (const told of eventsOf(response)) {
      if (told.error) throw Object.assign(new Error(told.error.message), { name: "Told" });
      yield told;
    }
  }

  #say({ role, text = "", images = [], model }) {
    const said = element("div", { className: "text" }, text);
    const shown = images.map((address, index) => element("img", { src: address, alt: `Image ${index + 1}` }));
    const who = element("b", {}, model ?? "You");
    this.log.append(element("div", { className: `message ${role}` }, who, ...shown, said));
    toEnd(this.log);
    return said;
  }
}

const isNearEnd = (log) => log.scrollHeight - log.scrollTop - log.clientHeight < NEAR;

const toEnd = (log) => (log.scrollTop = log.scrollHeight);

/** Who reads the end of a conversation goes on seeing it when the log gets lower. */
function stayAtEnd(log) {
  let [isAtEnd, height] = [true, log.clientHeight];
  log.addEventListener("scroll", () => {
    if (log.clientHeight === height) isAtEnd = isNearEnd(log); // else the observer comes next: nobody has scrolled away
  });
  new ResizeObserver(() => {
    height = log.clientHeight;
    if (isAtEnd) toEnd(log);
  }).observe(log);
}

/** An answer while it is written: `place` shows its Markdown as elements, at most once a frame. What the model reasons
 * before it is folded away above. */
class Answer {
  constructor(place, log, text = "", thought = "") {
    [this.place, this.log, this.text, this.thought] = [place, log, text, thought];
    place.classList.add("markdown");
    this.reasoning = element("div", { className: "thought" });
    this.folded = element("details", { className: "reasoning" }, element("summary", {}, "Reasoning"), this.reasoning);
  }

  hear(told) {
    this.text += told.choices[0]?.delta.content ?? "";
    this.thought += told.choices[0]?.delta.reasoning_content ?? "";
    this.frame ??= requestAnimationFrame(() => this.#draw());
  }

  end(words) {
    cancelAnimationFrame(this.frame);
    this.#draw();
    if (!this.text && !this.thought) return;
    this.place.after(element("p", { className: "note" }, words, " ", copyButton(() => this.text)));
    toEnd(this.log);
  }

  #draw() {
    this.frame = undefined;
    const isAtEnd = isNearEnd(this.log);
    if (this.thought && !this.folded.isConnected) this.place.before(this.folded);
    write(this.reasoning, this.thought);
    this.place.replaceChildren(...rendered(this.text));
    if (isAtEnd) toEnd(this.log); // who has scrolled up reads on there
  }
}

/** How fast an answer is written, as it is seen here. */
class Pace {
  constructor() {
    this.asked = performance.now();
    this.tokens = 0;
  }

  hear({ choices, usage }) {
    const delta = choices[0]?.delta;
    if (delta?.content || delta?.reasoning_content) this.first ??= performance.now();
    if (choices[0]?.finish_reason === "length") this.isFull = true;
    if (usage) this.tokens = usage.completion_tokens;
  }

  /** An answer that was stopped or cut off has no count. */
  words() {
    const now = performance.now();
    const wait = seconds(((this.first ?? now) - this.asked) / 1000);
    if (!this.tokens) return `unfinished, the first token after ${wait}`;
    const count = `${plural(this.tokens, "token")}${this.isFull ? " (the limit)" : ""}, the first after ${wait}`;
    const speed = rate((this.tokens - 1) / Math.max(0.001, (now - this.first) / 1000));
    return this.tokens > 1 ? `${count}, then ${speed} a second` : count;
  }
}

function contentOf({ text, images = [] }) {
  if (!images.length) return text;
  const parts = images.map((url) => ({ type: "image_url", image_url: { url } }));
  return text ? [...parts, { type: "text", text }] : parts;
}

const addressOf = (file) =>
  new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
