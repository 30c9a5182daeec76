/** Speech from the microphone to the server, by `/v1/realtime`, in the shape of OpenAI's realtime transcription. */

import { key } from "./api.js";

export const RATE = 24000; // Hz, of what is sent

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

/** One time of speaking. `heard(item, text, isWhole)`: text of an utterance; `level(share)`: how loud it is. */
export class Microphone {
  constructor({ model, heard, level, failed, ended }) {
    Object.assign(this, { model, heard, level, failed, ended });
    this.texts = new Map();
  }

  /** Raises where there is no microphone, or nobody may use it. */
  async start() {
    if (!navigator.mediaDevices) throw new Error("a browser gives the microphone to pages from https or localhost alone");
    const constraints = { channelCount: 1, echoCancellation: true, noiseSuppression: true };
    this.stream = await navigator.mediaDevices.getUserMedia({ audio: constraints });
    this.context = new AudioContext();
    const source = URL.createObjectURL(new Blob([`(${recorder})()`], { type: "text/javascript" }));
    await this.context.audioWorklet.addModule(source);
    URL.revokeObjectURL(source);
    this.#connect();
  }

  /** No more is recorded; what was said is still heard. */
  stop() {
    this.#silence();
    if (this.socket?.readyState === WebSocket.OPEN) this.#send({ type: "input_audio_buffer.commit" });
    this.closing = setTimeout(() => this.socket?.close(), 5000);
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
    const input = { format: { type: "audio/pcm", rate: RATE }, transcription: { model: this.model }, turn_detection: { type: "server_vad" } };
    this.#send({ type: "session.update", session: { type: "transcription", audio: { input } } });
    this.node = new AudioWorkletNode(this.context, "recorder");
    this.node.port.onmessage = ({ data }) => this.#append(new Int16Array(data));
    this.context.createMediaStreamSource(this.stream).connect(this.node);
  }

  #append(samples) {
    this.level(Math.min(1, 4 * Math.sqrt(samples.reduce((sum, one) => sum + one * one, 0) / samples.length) / 32767));
    if (this.socket.readyState === WebSocket.OPEN) this.#send({ type: "input_audio_buffer.append", audio: base64(new Uint8Array(samples.buffer)) });
  }

  #send(told) {
    this.socket.send(JSON.stringify(told));
  }

  #take(told) {
    const item = told.item_id;
    if (told.type === "conversation.item.input_audio_transcription.delta") {
      this.texts.set(item, (this.texts.get(item) ?? "") + told.delta);
      this.heard(item, this.texts.get(item), false);
    } else if (told.type === "conversation.item.input_audio_transcription.completed") {
      this.heard(item, told.transcript, true);
    } else if (told.type === "conversation.item.input_audio_transcription.failed" || told.type === "error") {
      this.failed(told.error?.message ?? "the server could not transcribe this");
    }
  }

  #over(code, reason) {
    clearTimeout(this.closing);
    this.#silence();
    if (code !== 1000 && code !== 1005) this.failed(reason || "The connection for speech was closed, or could not be made.");
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
