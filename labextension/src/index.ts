import { ILabShell, ILayoutRestorer, type JupyterFrontEnd, type JupyterFrontEndPlugin } from '@jupyterlab/application';
import { ICommandPalette, WidgetTracker } from '@jupyterlab/apputils';
import { ILauncher } from '@jupyterlab/launcher';
import { INotebookTracker } from '@jupyterlab/notebook';
import { ISettingRegistry } from '@jupyterlab/settingregistry';
import { IStatusBar } from '@jupyterlab/statusbar';
import { ITranslator, nullTranslator } from '@jupyterlab/translation';
import { setTranslate } from '../../ui/src/texts.ts';
import { addCommands, COMMANDS, type TimelineWidget } from './commands.ts';
import { addOneRank, ONE_RANK } from './debugger.ts';
import { KernelFeeds } from './feed.ts';
import { makeLabServices } from './files.ts';
import { removeEndedPrompts } from './input_prompts.ts';
import { RanksItem, RanksModel } from './panel_toolbar.ts';
import { follow, type Settings } from './settings.ts';
import { keepStills } from './stills.ts';

const ID = '@hvdlab/labextension:plugin';

const plugin: JupyterFrontEndPlugin<void> = {
  id: ID,
  description: 'A panel with the timeline of all ranks.',
  autoStart: true,
  requires: [INotebookTracker],
  optional: [ICommandPalette, ILauncher, ILayoutRestorer, ISettingRegistry, IStatusBar, ITranslator, ILabShell],
  activate: (
    app: JupyterFrontEnd,
    notebooks: INotebookTracker,
    palette: ICommandPalette | null,
    launcher: ILauncher | null,
    restorer: ILayoutRestorer | null,
    registry: ISettingRegistry | null,
    statusBar: IStatusBar | null,
    translator: ITranslator | null,
    labShell: ILabShell | null,
  ) => {
    const trans = (translator ?? nullTranslator).load('hvdlab');
    setTranslate((text, ...values) => trans.__(text, ...values));
    const feeds = new KernelFeeds(trans);
    const settings: Settings = { area: 'bottom', openWithRanks: false, follow: true, ranks: false, membership: false, status: true, spans: feeds.limit };
    const host = makeLabServices(app, notebooks, feeds, settings, trans);
    const tracker = new WidgetTracker<TimelineWidget>({ namespace: 'hvdlab' });
    const open = addCommands(app, host, tracker, settings, labShell);
    addOneRank(app, notebooks, feeds, trans);
    removeEndedPrompts(notebooks);
    keepStills(notebooks);

    const category = trans.__('hvdlab');
    for (const command of [...COMMANDS, ONE_RANK]) palette?.addItem({ command, category });
    launcher?.add({ command: 'hvdlab:open-timeline', category: trans.__('Other'), rank: 20 });
    if (restorer) void restorer.restore(tracker, { command: 'hvdlab:open-timeline', args: ({ content }) => ({ ...content.choice, restored: true }), name: () => 'timeline' });

    const model = new RanksModel(notebooks, feeds, trans);
    if (statusBar) {
      const item = new RanksItem(model, trans, () => open());
      statusBar.registerStatusItem(`${ID}:ranks`, { item, align: 'left', rank: 60, isActive: () => settings.status && model.text !== '', activeStateChanged: model.stateChanged });
    }
    let had = false;
    model.stateChanged.connect(() => {
      const has = model.text !== '';
      if (has && !had && settings.openWithRanks) open();
      had = has;
    });
    // The button is in the toolbar of notebooks that have the extension loaded.
    notebooks.widgetAdded.connect((_, notebook) => {
      feeds.of(notebook.sessionContext).changed.connect((_, channel) => {
        if (channel === null) app.commands.notifyCommandChanged('hvdlab:toolbar-timeline');
      });
    });
    notebooks.currentChanged.connect(() => app.commands.notifyCommandChanged('hvdlab:toolbar-timeline'));
    follow(registry, ID, settings, () => {
      feeds.limit = settings.spans;
      model.shown = (settings.status && statusBar !== null) || settings.openWithRanks;
      model.stateChanged.emit();
      tracker.forEach(widget => widget.content.refresh());
    });
  },
};

export default plugin;
