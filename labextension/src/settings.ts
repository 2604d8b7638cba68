import type { ISettingRegistry } from '@jupyterlab/settingregistry';

/** As in schema/plugin.json. */
export interface Settings {
  area: 'bottom' | 'right' | 'tab' | 'down';
  openWithRanks: boolean;
  follow: boolean;
  ranks: boolean;
  membership: boolean;
  status: boolean;
  spans: number;
}

/** Keeps `settings` as the user has them now. */
export function follow(registry: ISettingRegistry | null, id: string, settings: Settings, changed: () => void): void {
  changed();
  if (!registry) return;
  const take = (found: ISettingRegistry.ISettings) => {
    Object.assign(settings, found.composite);
    changed();
  };
  registry
    .load(id)
    .then(found => {
      take(found);
      found.changed.connect(take);
    })
    .catch((reason: unknown) => console.warn(`hvdlab: the settings could not be read, so all are as they come: ${String(reason)}`));
}
