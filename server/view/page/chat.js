/** The box to chat: a conversation with a model that generates text, with images where it reads them. */

import { askJson, newRequestName, reasonOf } from "./api.js";
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

const NEAR = 40; // pixels: so near to its end a conversation follows what is written

export class Chat {
  /** `failed` is told the model, the id of the request and the reason of a failure. */
  constructor(models, failed) {
    this.failed = failed;
    for (const name of PARTS) this[name.replace("-", "_")] = byId(`chat-${name}`);
    this.models = models;
    this.messages = [];
    this.added = []; // images of the next message
    models.listeners.push((all) => this.#offer(all));
    this.model.addEventListener("change", () => this.#offer(models.models));
    this.form.addEventListener("submit", (event) => this.#submit(event));
    this.text.addEventListener("keydown", (event) => this.#sendByKey(event));
    this.clear.addEventListener("click", () => this.#begin());
    this.file.addEventListener("change", () => this.#addAll([...this.file.files]));
    takeDrops(byId("chat"), (files) => this.#addAll(files));
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
    this.messages.push({ role: "user", content: contentOf(text, images) });
    this.#say("user", text, images);
    this.text.value = "";
    this.#setImages([]);
    tellProblem(this.problem, null);
    const isAnswered = await this.#answer(new Answer(this.#say("assistant", ""), this.log));
    if (!isAnswered) this.#takeBack(text, images);
  }

  /** Whether there is an answer, or a part of one. */
  async #answer(answer) {
    const id = newRequestName("Chat");
    this.#run(new AbortController());
    try {
      for await (const told of this.#told(id, this.control.signal)) answer.hear(told);
    } catch (error) {
      const reason = reasonOf(error);
      tellProblem(this.problem, reason);
      if (reason !== null) this.failed(this.model.value, id, reason);
      if (!answer.text) return false;
    } finally {
      this.#run(null);
      answer.end();
    }
    this.messages.push({ role: "assistant", content: answer.text });
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
  #takeBack(text, images) {
    this.messages.pop();
    this.log.lastElementChild.remove();
    this.log.lastElementChild.remove();
    this.text.value ||= text;
    if (!this.added.length) this.#setImages(images);
  }

  async *#told(id, signal) {
    const body = {
      model: this.model.value,
      messages: this.messages,
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

  #say(role, text, images = []) {
    const said = element("div", { className: "text" }, text);
    const shown = images.map((address, index) => element("img", { src: address, alt: `Image ${index + 1}` }));
    const who = element("b", {}, role === "user" ? "You" : this.model.value);
    this.log.append(element("div", { className: `message ${role}` }, who, ...shown, said));
    this.log.scrollTop = this.log.scrollHeight;
    return said;
  }
}

/** An answer while it is written: `place` shows its Markdown as elements, at most once a frame. */
class Answer {
  constructor(place, log) {
    [this.place, this.log, this.text, this.pace] = [place, log, "", new Pace()];
    place.classList.add("markdown");
  }

  hear(told) {
    this.pace.hear(told);
    this.text += told.choices[0]?.delta.content ?? "";
    this.frame ??= requestAnimationFrame(() => this.#draw());
  }

  end() {
    cancelAnimationFrame(this.frame);
    this.#draw();
    if (!this.text) return;
    this.place.after(element("p", { className: "note" }, this.pace.words(), " ", copyButton(() => this.text)));
    this.log.scrollTop = this.log.scrollHeight;
  }

  #draw() {
    this.frame = undefined;
    const isAtEnd = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < NEAR;
    this.place.replaceChildren(...rendered(this.text));
    if (isAtEnd) this.log.scrollTop = this.log.scrollHeight; // who has scrolled up reads on there
  }
}

/** How fast an answer is written, as it is seen here. */
class Pace {
  constructor() {
    this.asked = performance.now();
    this.tokens = 0;
  }

  hear({ choices, usage }) {
    if (choices[0]?.delta.content) this.first ??= performance.now();
    if (usage) this.tokens = usage.completion_tokens;
  }

  words() {
    const now = performance.now();
    if (!this.first) return plural(this.tokens, "token");
    const speed = rate((this.tokens - 1) / Math.max(0.001, (now - this.first) / 1000));
    const wait = seconds((this.first - this.asked) / 1000);
    return `${plural(this.tokens, "token")}, the first after ${wait}, then ${speed} a second`;
  }
}

function contentOf(text, images) {
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
