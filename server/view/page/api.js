/** Requests to this server, with the key. */

const PLACE = "triolet-key";
const NO_KEY = "The server does not know this key. Check it, or ask whoever runs the server.";

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
  if (response.status === 401) throw new Problem(401, NO_KEY);
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

/** Keeps a list of this tab, over a reload too, until the tab is closed. Of what is too much for the browser (images of
 * a conversation) the oldest is not kept, as many values `together`. */
export function keep(place, values, together = 1) {
  try {
    sessionStorage.setItem(place, JSON.stringify(values));
  } catch (error) {
    if (error.name !== "QuotaExceededError") throw error;
    if (values.length) keep(place, values.slice(together), together);
    else sessionStorage.removeItem(place);
  }
}

export const kept = (place) => JSON.parse(sessionStorage.getItem(place) ?? "[]");

const OF_PAGES = "page-";
const OWN_PLACE = "triolet-own";
const MOST_OWN = 100;
let ownTitles = null; // of the requests of this tab, by their names; read when they are first needed

const own = () => (ownTitles ??= new Map(kept(OWN_PLACE)));

/** Remembers that a request is of this tab, and what it is called there, until the tab is closed. */
export function rememberOwn(name, title) {
  own().set(name, title);
  keep(OWN_PLACE, [...own()].slice(-MOST_OWN));
}

/** What a request of this tab is called; nothing where it is of others. */
export const ownTitle = (name) => own().get(name);

/** A name for a new request of this tab, by which its lane is found. */
export function newRequestName(title) {
  const random = crypto.getRandomValues(new Uint8Array(5));
  const name = OF_PAGES + Array.from(random, (byte) => byte.toString(16).padStart(2, "0")).join("");
  rememberOwn(name, title);
  return name;
}

/** Whether a request is of a page, here or elsewhere: nobody else has its name. */
export const isOfPage = (name) => name.startsWith(OF_PAGES);

/** Why something failed, in words; nothing where it was called off here. */
export function reasonOf(error) {
  if (error.name === "AbortError") return null;
  return error instanceof Problem || error.name === "Told" ? error.message : `The server cannot be reached (${error.message}).`;
}
