import type { JupyterFrontEnd } from '@jupyterlab/application';
import { Notification } from '@jupyterlab/apputils';
import { PathExt } from '@jupyterlab/coreutils';
import type { INotebookTracker, NotebookPanel } from '@jupyterlab/notebook';
import type { TranslationBundle } from '@jupyterlab/translation';
import { bytes } from '../../ui/src/draw/format.ts';
import { PERFETTO } from '../../ui/src/view/options.ts';
import type { KernelFeed, KernelFeeds } from './feed.ts';
import type { LabServices } from './panel.ts';
import type { Settings } from './settings.ts';

const SAVE_WITHIN = 180_000; // ms; a million spans take half a minute
const PROGRESS_AFTER = 500; // ms; most timelines are saved by then
const PROGRESS_FOR = 1000; // ms; JupyterLab draws a notification later, and loses what is changed in it before

/** A notification that something goes on, shown only if that takes long. */
function progress(message: string): { ended(): Promise<string | null> } {
  let shown: { id: string; since: number } | null = null;
  const timer = window.setTimeout(() => {
    shown = { id: Notification.emit(message, 'in-progress', { autoClose: false }), since: Date.now() };
  }, PROGRESS_AFTER);
  return {
    /** The notification's identifier, as soon as it can be changed; null if there is none. */
    async ended() {
      window.clearTimeout(timer);
      if (!shown) return null;
      const rest = shown.since + PROGRESS_FOR - Date.now();
      if (rest > 0) await new Promise((resolve) => window.setTimeout(resolve, rest));
      return shown.id;
    },
  };
}

/** Return the services of JupyterLab for a panel. */
export function makeLabServices(app: JupyterFrontEnd, notebooks: INotebookTracker, feeds: KernelFeeds, options: Settings, trans: TranslationBundle): LabServices {
  /** A path beside a notebook, as the server's contents have it. */
  const beside = (notebook: NotebookPanel, path: string) => PathExt.join(PathExt.dirname(notebook.context.path), path);

  async function open(notebook: NotebookPanel, site: string): Promise<void> {
    const place = parseSite(site);
    if (place?.cell !== undefined) {
      app.shell.activateById(notebook.id);
      const feed = feeds.of(notebook.sessionContext);
      if (await jumpToCell(notebook, place.cell, place.line, feed.sources.get(place.cell))) return;
      throw new Error(trans.__('Cell [%1] is not in %2 any more', place.cell, notebook.title.label));
    }
    const { commands } = app;
    if (!place?.file || !commands.hasCommand('docmanager:open')) throw new Error(trans.__('%1 can not be opened here', site));
    try {
      await commands.execute('docmanager:open', { path: beside(notebook, place.file), factory: 'Editor' });
    } catch {
      throw new Error(trans.__('%1 is not beside the notebook', place.file));
    }
    if (commands.hasCommand('fileeditor:go-to-line')) await commands.execute('fileeditor:go-to-line', { line: place.line });
  }

  async function save(notebook: NotebookPanel, feed: KernelFeed, pool: string): Promise<void> {
    const saving = progress(trans.__('Saving the timeline…'));
    try {
      const { name, size } = (await feed.ask({ type: 'save', pool }, SAVE_WITHIN)) as { name: string; size: number };
      const download = async () => {
        const url = await app.serviceManager.contents.getDownloadUrl(beside(notebook, name));
        const link = document.createElement('a');
        link.href = url;
        link.download = name;
        link.click();
      };
      const message = trans.__('Saved %1 (%2)', name, bytes(size));
      const actions = [
        { label: trans.__('Download'), callback: () => void download() },
        { label: trans.__('Open Perfetto'), callback: () => void window.open(PERFETTO, '_blank', 'noopener,noreferrer') },
      ];
      const kept = { autoClose: 10_000, actions };
      const id = await saving.ended();
      if (id === null) Notification.success(message, kept);
      else Notification.update({ id, message, type: 'success', ...kept });
    } catch (error) {
      const id = await saving.ended();
      if (id !== null) Notification.dismiss(id);
      throw error;
    }
  }

  return { feeds, notebooks, options, trans, open, save };
}

/** `cell [7] line 4`, as the kernel writes where a collective was asked for. */
const CELL = /^cell \[(\d+)\](?: line (\d+))?/;
/** `train.py:33`. */
const FILE = /^(.+):(\d+)$/;

export interface Place {
  cell?: number;
  file?: string;
  line: number;
}

export function parseSite(site: string): Place | null {
  const cell = site.match(CELL);
  if (cell) return { cell: Number(cell[1]), line: Number(cell[2] ?? 1) };
  const file = site.match(FILE);
  return file ? { file: file[1], line: Number(file[2]) } : null;
}

/** Which cell was run as this number; -1 if there is none. `source` is what was run then, if that is known. */
function findCell(notebook: NotebookPanel, number: number, source: string | undefined): number {
  const cells = notebook.content.model?.cells;
  let same = -1;
  for (let i = 0; cells && i < cells.length; i++) {
    const model = cells.get(i);
    if (model.type !== 'code') continue;
    if ((model as { executionCount?: number | null }).executionCount === number) return i;
    if (source !== undefined && model.sharedModel.source === source) same = i;
  }
  return same;
}

/** Puts the cursor on a line of the cell that was run as this number. Returns whether there is such a cell. */
export async function jumpToCell(notebook: NotebookPanel, number: number, line: number, source?: string): Promise<boolean> {
  const { content } = notebook;
  const found = findCell(notebook, number, source);
  if (found < 0) return false;
  content.activeCellIndex = found;
  content.mode = 'edit';
  const cell = content.widgets[found];
  await content.scrollToItem(found, 'smart');
  await cell.ready;
  const { editor } = cell;
  if (editor) {
    const row = Math.min(Math.max(0, line - 1), editor.lineCount - 1);
    editor.setCursorPosition({ line: row, column: 0 });
    editor.revealPosition({ line: row, column: 0 });
    editor.focus();
  }
  return true;
}
