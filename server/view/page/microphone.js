/** Speech from the microphone to the server, by `/v1/realtime`, in the shape of OpenAI's realtime transcription. */

import { key, rememberOwn } from "./api.js";

const RATE = 24000; // Hz, of what is sent
const PROVISIONAL = "triolet.provisional"; // words that may still change
const QUIET = 1500; // milliseconds without a word, after which nothing more is awaited
const FIRST_QUIET = 5000;
const OF_TEXT = "conversation.item.input_audio_transcription.";
const GOOD_ENDS = new Set([1000, 1005]);

/** Runs in the audio's own thread: mono samples at `RATE`, 0.1 s at a time. Each is the mean of those it stands for. */
function recorder() {
  const WANTED = 24000;
  const PORTION = 2400;
  class Recorder extends AudioWorkletProcessor {
    #portion = new Int16Array(PORTION);
    #filled = 0;
    #sum = 0;
    #count = 0;
    #phase = 0;

    process([input]) {
      for (const sample of input[0] ?? []) this.#take(sample);
      return true;
    }

    #take(sample) {
      this.#sum += sample;
      this.#count += 1;
      this.#phase += WANTED;
      if (this.#phase < sampleRate) return;
      this.#phase -= sampleRate;
      this.#put(this.#sum / this.#count);
      this.#sum = this.#count = 0;
    }

    #put(value) {
      this.#portion[this.#filled++] = Math.max(-1, Math.min(1, value)) * 32767;
      if (this.#filled < PORTION) return;
      this.port.postMessage(this.#portion.buffer, [this.#portion.buffer]);
      this.#portion = new Int16Array(PORTION);
      this.#filled = 0;
    }
  }
  registerProcessor("recorder", Recorder);
}

/** One time of speaking. `heard(item, text, provisional)`: what is known of an utterance; `level(share)`: how loud it
 * is; `failed(reason)`; `ended()`: the last word was heard. */
export class Microphone {
  constructor({ model, heard, level, failed, ended }) {
    Object.assign(this, { model, heard, level, failed, ended });
    this.texts = new Map();
    this.takes = {
      "session.created": ({ session }) => rememberOwn(session.id, "Microphone"),
      [`${OF_TEXT}delta`]: ({ item_id, delta }) => this.#tell(item_id, (this.texts.get(item_id) ?? "") + delta),
      [`${OF_TEXT}completed`]: ({ item_id, transcript }) => this.#tell(item_id, transcript),
      [PROVISIONAL]: ({ item_id, text }) => this.#tell(item_id, this.texts.get(item_id) ?? "", text),
      [`${OF_TEXT}failed`]: ({ error }) => this.failed(error.message),
      error: ({ error }) => this.failed(error.message),
    };
  }

  /** Raises where there is no microphone, or nobody may use it. */
  async start() {
    if (!navigator.mediaDevices)
      throw new Error("browsers give the microphone only to pages from https or localhost");
    const constraints = { channelCount: 1, echoCancellation: true, noiseSuppression: true };
    this.stream = await navigator.mediaDevices.getUserMedia({ audio: constraints });
    this.context = new AudioContext();
    const source = URL.createObjectURL(new Blob([`(${recorder})()`], { type: "text/javascript" }));
    await this.context.audioWorklet.addModule(source);
    URL.revokeObjectURL(source);
    if (this.isOver)
      this.ended(); // it was stopped meanwhile
    else this.#connect();
  }

  /** No more is recorded; what was said is still heard. */
  stop() {
    this.#silence();
    if (this.socket?.readyState === WebSocket.OPEN) this.#send({ type: "input_audio_buffer.commit" });
    this.isOver = true;
    this.#closeIn(FIRST_QUIET);
  }

  #closeIn(milliseconds) {
    clearTimeout(this.closing);
    this.closing = setTimeout(() => this.socket?.close(), milliseconds);
  }

  #connect() {
    const address = new URL("v1/realtime", location.href);
    address.protocol = address.protocol.replace("http", "ws");
    address.search = new URLSearchParams({ intent: "transcription", model: this.model });
    const secret = key() ? [`openai-insecure-api-key.${key()}`] : [];
    this.socket = new WebSocket(address, ["realtime", ...secret]);
    this.socket.onopen = () => this.#begin();
    this.socket.onmessage = ({ data }) => this.#take(JSON.parse(data));
    this.socket.onclose = ({ code, reason }) => this.#over(code, reason);
  }

  #begin() {
    const input = {
      format: { type: "audio/pcm", rate: RATE },
      transcription: { model: this.model },
      turn_detection: { type: "server_vad" },
    };
    this.#send({
      type: "session.update",
      session: { type: "transcription", audio: { input }, include: [PROVISIONAL] },
    });
    this.node = new AudioWorkletNode(this.context, "recorder");
    this.node.port.onmessage = ({ data }) => this.#append(new Int16Array(data));
    this.context.createMediaStreamSource(this.stream).connect(this.node);
  }

  #append(samples) {
    this.level(Math.min(1, (4 * Math.sqrt(samples.reduce((sum, one) => sum + one * one, 0) / samples.length)) / 32767));
    if (this.socket.readyState === WebSocket.OPEN)
      this.#send({ type: "input_audio_buffer.append", audio: base64(new Uint8Array(samples.buffer)) });
  }

  #send(told) {
    this.socket.send(JSON.stringify(told));
  }

  #take(told) {
    this.takes[told.type]?.(told);
    if (this.isOver) this.#closeIn(QUIET);
  }

  #tell(item, text, provisional = "") {
    this.texts.set(item, text);
    this.heard(item, text, provisional);
  }

  #over(code, reason) {
    clearTimeout(this.closing);
    this.#silence();
    if (!GOOD_ENDS.has(code)) this.failed(reason || "The connection for speech was closed, or could not be made.");
    this.ended();
  }

  #silence() {
    for (const track of this.stream?.getTracks() ?? []) track.stop();
    if (this.context?.state !== "closed") this.context?.close();
    this.level(0);
  }
}

export function base64(data) {
  let text = "";
  for (let at = 0; at < data.length; at += 4096) text += String.fromCharCode(...data.subarray(at, at + 4096));
  return btoa(text);
}
