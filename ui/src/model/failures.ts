/** Something that the kernel could not bring up to date: a sentence, and the traceback for whoever is to mend it. */
export interface Failure {
  text: string;
  trace: string;
}
