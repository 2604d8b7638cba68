import { t } from '../texts.ts';

const TITLES: Record<string, () => string> = {
  'hvdlab/step_time': () => t('Step time'),
  'hvdlab/samples_per_second': () => t('Samples/s'),
  'hvdlab/share/': () => t('Time spent'),
  'hvdlab/lateness': () => t('Lateness'),
  'hvdlab/gradient_norm': () => t('Gradient norm'),
  'hvdlab/loss_scale': () => t('Loss scale'),
  'hvdlab/learning_rate': () => t('Learning rate'),
  'hvdlab/cpu': () => t('CPU'),
  'hvdlab/rss': () => t('Memory'),
  'hvdlab/threads': () => t('Threads'),
};

/** What a chart is called: our own by their meaning, those of users as they call them. */
export function titleOf(id: string): string {
  const known = TITLES[id];
  if (known) return known();
  const gpu = id.match(/^hvdlab\/gpu(\d+)\/(\w+)$/);
  if (gpu) return gpu[2] === 'memory' ? t('GPU %1 memory', gpu[1]) : t('GPU %1', gpu[1]);
  const bandwidth = id.match(/^hvdlab\/bandwidth\/(bus|algorithm)\/(.+)$/);
  if (bandwidth) return bandwidth[1] === 'bus' ? t('%1 bus', bandwidth[2]) : t('%1 algorithm', bandwidth[2]);
  return id.replace(/^hvdlab\//, '').replaceAll('_', id.startsWith('hvdlab/') ? ' ' : '_');
}
