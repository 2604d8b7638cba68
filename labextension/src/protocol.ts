// What kernel and page say to each other; the kernel's side is widgets/panel.py and magics/panel.py.
import type { JSONObject } from '@lumino/coreutils';

export const TARGET = 'hvdlab';
export const STREAM = 'hvdlab-stream';
export const REQUESTS = 'hvdlab-requests';

/** The pool of the notebook, whichever that is. */
export const OWN = '';

/** A pool that a notebook can show. */
export interface Pool extends JSONObject {
  id: string;
  kind: 'own' | 'variable' | 'kept';
  name: string;
  size: number;
}

/** What comes from the kernel, by `type`. */
export type FromKernel =
  | { type: 'here'; protocol: number }
  | { type: 'nothing'; pool: string; text?: string }
  | { type: 'rows'; pool: string; recording: string }
  | ({ type: 'answer'; request: string | null; error?: string } & JSONObject);
