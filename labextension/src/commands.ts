import { LabIcon, Toolbar } from '@jupyterlab/ui-components';
import type { ILabShell, JupyterFrontEnd } from '@jupyterlab/application';
import { MainAreaWidget, type WidgetTracker } from '@jupyterlab/apputils';
import svgstr from '../style/icon.svg';
import { OWN } from './kernel_channel.ts';
import { TimelinePanel, type Choice, type LabServices } from './panel.ts';
import { HeadingText, PoolSelect } from './panel_toolbar.ts';
import type { Settings } from './settings.ts';

/** Lanes, of which one is late. */
export const ranksIcon = new LabIcon({ name: 'hvdlab:ranks', svgstr });

export type TimelineWidget = MainAreaWidget<TimelinePanel>;

/** Those in the palette, in their order. */
export const COMMANDS = ['hvdlab:open-timeline', 'hvdlab:follow', 'hvdlab:show-everything', 'hvdlab:search', 'hvdlab:table-of-ranks', 'hvdlab:membership', 'hvdlab:save-chrome'];

const MODES = { bottom: 'split-bottom', right: 'split-right', tab: 'tab-after', down: undefined } as const;

function makeWidget(host: LabServices): TimelineWidget {
  const { trans } = host;
  const content = new TimelinePanel(host);
  const widget: TimelineWidget = new MainAreaWidget({ content });
  widget.id = 'hvdlab-timeline';
  widget.addClass('jp-HvdlabTimeline');
  widget.title.icon = ranksIcon;
  widget.title.closable = true;
  const name = () => {
    const label = content.choice.notebook || content.choice.pool ? content.shown?.notebook.title.label : undefined;
    widget.title.label = label ? trans.__('Ranks of %1', label) : trans.__('Ranks');
    widget.title.caption = trans.__('What all ranks do, live');
  };
  content.changed.connect(name);
  name();
  widget.toolbar.addItem('source', new PoolSelect(content, host));
  widget.toolbar.addItem('heading', new HeadingText(content, trans));
  widget.toolbar.addItem('spacer', Toolbar.createSpacerItem());
  return widget;
}

/** Add the commands; return a function that opens the panel. */
export function addCommands(app: JupyterFrontEnd, host: LabServices, tracker: WidgetTracker<TimelineWidget>, settings: Settings, labShell: ILabShell | null): (args?: object) => void {
  const { commands, shell } = app;
  const { trans, notebooks } = host;
  // One that was restored has not been in front yet.
  const there = () => tracker.currentWidget ?? tracker.find(widget => !widget.isDisposed) ?? null;
  const shown = () => there()?.content ?? null;

  function open(args: Partial<Choice> & { restored?: boolean } = {}): TimelineWidget {
    let widget = there();
    if (!widget || widget.isDisposed) {
      widget = makeWidget(host);
      void tracker.add(widget);
      widget.content.changed.connect(() => {
        for (const command of COMMANDS) commands.notifyCommandChanged(command);
      });
    }
    if (args.notebook || args.pool) widget.content.choose({ notebook: args.notebook ?? '', pool: args.pool ?? OWN });
    if (!widget.isAttached) {
      // Notebook 7 has one document in its main area and shows nothing else there; so has JupyterLab in its simple mode.
      const area = labShell?.mode !== 'multiple-document' || settings.area === 'down' ? 'down' : 'main';
      widget.toggleClass('jp-mod-down', area === 'down');
      const front = notebooks.currentWidget;
      const place = area === 'main' ? { mode: MODES[settings.area], ...(front && !args.restored ? { ref: front.id } : {}) } : {};
      shell.add(widget, area, place as never);
    }
    if (!args.restored) {
      shell.activateById(widget.id);
      // The area below only shows it, and the palette gives the focus back to where it was.
      const opened = widget;
      requestAnimationFrame(() => opened.activate());
    }
    return widget;
  }

  const hasTimeline = () => !!shown()?.view;
  const save = () => {
    const found = shown()?.shown;
    if (found) shown()!.tell(host.save(found.notebook, found.feed, found.channel.pool));
  };

  commands.addCommand('hvdlab:open-timeline', {
    label: trans.__('Timeline of the Ranks'),
    caption: trans.__('Show what all ranks do, live'),
    icon: ranksIcon,
    // A launcher would put a widget that it gets in its own place, wherever the user wants to have it.
    execute: args => void open(args as Partial<Choice>),
  });
  commands.addCommand('hvdlab:toolbar-timeline', {
    label: '',
    caption: trans.__('Show what all ranks do, live'),
    icon: ranksIcon,
    isVisible: () => !!notebooks.currentWidget && host.feeds.of(notebooks.currentWidget.sessionContext).here,
    execute: () => open(),
  });
  commands.addCommand('hvdlab:follow', {
    label: trans.__('Follow What the Ranks Do'),
    isEnabled: hasTimeline,
    isToggled: () => shown()?.view?.view.following ?? false,
    execute: () => {
      const timeline = shown()?.view;
      timeline?.view.follow(!timeline.view.following);
      timeline?.data();
      commands.notifyCommandChanged('hvdlab:follow');
    },
  });
  commands.addCommand('hvdlab:show-everything', {
    label: trans.__('Show the Whole Timeline of the Ranks'),
    isEnabled: hasTimeline,
    execute: () => {
      const timeline = shown()?.view;
      timeline?.view.fit();
      timeline?.data();
    },
  });
  commands.addCommand('hvdlab:search', {
    label: trans.__('Search Tensors in the Timeline of the Ranks'),
    isEnabled: hasTimeline,
    execute: () => shown()?.view?.root.querySelector<HTMLInputElement>('input[type=search]')?.focus(),
  });
  commands.addCommand('hvdlab:table-of-ranks', {
    label: trans.__('Table of the Ranks'),
    isToggled: () => settings.ranks,
    execute: () => {
      settings.ranks = !settings.ranks;
      open().content.refresh();
      commands.notifyCommandChanged('hvdlab:table-of-ranks');
    },
  });
  commands.addCommand('hvdlab:membership', {
    label: trans.__('Membership of the Ranks'),
    caption: trans.__('Show which ranks came and went; resize, repair, restart and sync them'),
    isToggled: () => settings.membership,
    execute: () => {
      settings.membership = !settings.membership;
      open().content.refresh();
      commands.notifyCommandChanged('hvdlab:membership');
    },
  });
  commands.addCommand('hvdlab:save-chrome', { label: trans.__('Save Timeline of the Ranks as Chrome Trace'), isEnabled: hasTimeline, execute: save });
  return args => void open(args as Partial<Choice>);
}
