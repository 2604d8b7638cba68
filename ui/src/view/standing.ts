import type { Liveness } from '../model/liveness.ts';
import { t } from '../texts.ts';

/** Says that what is shown is not of now, and of when it is; empty while it is of now. */
export function standingText({ standing, at }: Liveness): string {
  const time = new Date(at).toLocaleTimeString();
  if (standing === 'ended') return t('ended · as of %1', time);
  if (standing === 'away') return t('no connection · as of %1', time);
  return standing === 'silent' ? t('no news since %1', time) : '';
}
