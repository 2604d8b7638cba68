import type { TranslationBundle } from '@jupyterlab/translation';
import type { Channel, Feed } from './feed.ts';

/** What the ranks do, in a line; of a kernel that can't be heard only what is likely to be so still. */
export function headingOf(feed: Feed, { store, liveness }: Channel, trans: TranslationBundle): string {
  const { heading } = store;
  const [ranks] = heading.split(' · ');
  if (feed.away && heading) return trans.__('%1 · connection lost', ranks);
  return liveness.standing === 'silent' && heading ? trans.__('%1 · no news', ranks) : heading;
}
