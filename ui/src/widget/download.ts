/** Lets the reader keep a file. */
export function download(name: string, content: DataView): void {
  const url = URL.createObjectURL(new Blob([content as unknown as BlobPart], { type: 'application/octet-stream' }));
  const link = document.createElement('a');
  link.href = url;
  link.download = name;
  link.click();
  // Not at once: the browser begins to read it after the click.
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}
