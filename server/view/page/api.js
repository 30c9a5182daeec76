/** Requests to this server, with the key. */

const PLACE = "triolet-key";

/** What the server answers to a request that it does not do. */
export class Problem extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const key = () => sessionStorage.getItem(PLACE) ?? "";

export function setKey(value) {
  if (value) sessionStorage.setItem(PLACE, value);
  else sessionStorage.removeItem(PLACE);
}

/** The answer, where it is a good one. Raises `Problem`, or what fetch raises. */
export async function ask(path, { headers = {}, ...rest } = {}) {
  const secret = key() ? { authorization: `Bearer ${key()}` } : {};
  const response = await fetch(path, { cache: "no-store", ...rest, headers: { ...headers, ...secret } });
  if (!response.ok) throw new Problem(response.status, await messageOf(response));
  return response;
}

async function messageOf(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return text || `the server answered with the status ${response.status}`;
  }
}

export const askJson = (path, body, { headers = {}, ...rest } = {}) =>
  ask(path, {
    method: "POST",
    body: JSON.stringify(body),
    headers: { "content-type": "application/json", ...headers },
    ...rest,
  });

const OWN = "page-";

/** A name for a request of this page, by which its lane is found. */
export function newRequestId() {
  const random = crypto.getRandomValues(new Uint8Array(5));
  return OWN + Array.from(random, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

export const isOwnRequest = (id) => id.startsWith(OWN);

/** Why something failed, in words; nothing where it was called off here. */
export function reasonOf(error) {
  if (error.name === "AbortError") return null;
  return error instanceof Problem || error.name === "Told" ? error.message : `The server cannot be reached (${error.message}).`;
}
