// Integer columns as typed arrays; columns.py packs them and says how.

/** The columns of a packed table by name, each a Float64Array or Int32Array, and `rows`, how long each is. */
export async function unpackColumns({ rows, columns }) {
  const bytes = await Promise.all(columns.map((column) => inflate(column.data)));
  const unpacked = { rows };
  columns.forEach((column, number) => {
    const values = column.type === "int32" ? new Int32Array(rows) : new Float64Array(rows);
    readDifferences(bytes[number], values);
    if (column.form === "above") for (let row = 1; row < rows; row++) values[row] += values[row - 1];
    // The other column is there in its own unit already.
    if (column.unit !== 1) for (let row = 0; row < rows; row++) values[row] *= column.unit;
    if (column.form === "other") {
      const others = unpacked[column.other];
      for (let row = 0; row < rows; row++) values[row] += others[row];
    }
    unpacked[column.name] = values;
  });
  return unpacked;
}

async function inflate(base64) {
  const text = atob(base64);
  const packed = new Uint8Array(text.length);
  for (let at = 0; at < text.length; at++) packed[at] = text.charCodeAt(at);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** Seven bits a byte, lowest first, the sign lowest of all. No shifts: they would cut values to 32 bits. */
function readDifferences(bytes, values) {
  let at = 0;
  for (let row = 0; row < values.length; row++) {
    let byte = bytes[at++];
    const negative = byte & 1;
    let size = (byte & 127) >> 1;
    for (let scale = 64; byte > 127; scale *= 128) {
      byte = bytes[at++];
      size += (byte & 127) * scale;
    }
    values[row] = negative ? -size - 1 : size;
  }
  if (at !== bytes.length) throw new Error("a packed column has not the length that it says");
}
