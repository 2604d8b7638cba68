import type { TranslationBundle } from '@jupyterlab/translation';
import type { Channel, Feed } from './feed.ts';

/** What the ranks do, in a line; of a kernel that can't be heard only what is likely to be so still. */
export function headingOf(feed: Feed, { store }: Channel, trans: TranslationBundle): string {
  const { heading } = store;
  return feed.away && heading ? trans.__('%1 · connection lost', heading.split(' · ')[0]) : heading;
}
