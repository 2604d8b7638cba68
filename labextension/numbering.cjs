// Modules are numbered in order, not by a hash of where they lie: another checkout builds the same files.
module.exports = { optimization: { moduleIds: 'natural', chunkIds: 'natural' } };
