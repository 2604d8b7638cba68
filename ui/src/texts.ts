/** Gives the text of the reader's language; `%1`, `%2` in it stand for the values. */
export type Translate = (text: string, ...values: (string | number)[]) => string;

const plain: Translate = (text, ...values) => text.replace(/%(\d)/g, (_, place) => String(values[Number(place) - 1] ?? ''));
/** Where the page keeps it: widgets are scripts of their own, and one of the page knows the reader's language. */
const KEY = Symbol.for('hvdlab.translate');
const page = globalThis as { [KEY]?: Translate };

/** Texts of the views in the language of the reader; English where the host offers no other. */
export function t(text: string, ...values: (string | number)[]): string {
  return (page[KEY] ?? plain)(text, ...values);
}

/** Lets a host translate for the whole page from now on; what is shown already stays. */
export function setTranslate(found: Translate): void {
  page[KEY] = found;
}
