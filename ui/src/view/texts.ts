/** Gives the text of the reader's language; `%1`, `%2` in it stand for the values. */
export type Translate = (text: string, ...values: (string | number)[]) => string;

const plain: Translate = (text, ...values) => text.replace(/%(\d)/g, (_, place) => String(values[Number(place) - 1] ?? ''));
let translate: Translate = plain;

/** Texts of the views in the language of the reader; English where the host offers no other. */
export function t(text: string, ...values: (string | number)[]): string {
  return translate(text, ...values);
}

/** Lets a host translate from now on; what is shown already stays. */
export function setTranslate(found: Translate): void {
  translate = found;
}
