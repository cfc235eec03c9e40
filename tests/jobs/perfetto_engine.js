// Runs the engine of Perfetto's viewer, whose files are in the folder of the argument, outside of a browser: requests
// from standard input, replies to standard output, both of the type perfetto.protos.TraceProcessorRpcStream.
const fs = require("fs"), path = require("path"), vm = require("vm");
const folder = process.argv[2], exit = process.exit.bind(process);
const contents = (name) => fs.readFileSync(path.join(folder, path.basename(String(name))));
for (const kind of ["uncaughtException", "unhandledRejection"]) // the stack would have the whole engine, one long line
  process.on(kind, (error) => { fs.writeSync(2, String(error)); exit(1); });
const write = (bytes) => { for (let done = 0; done < bytes.length; ) done += fs.writeSync(1, bytes, done); };
const requests = new Uint8Array(fs.readFileSync(0));

// What the engine needs of a browser's worker thread. It refuses to run where there is a `process`.
Object.assign(globalThis, {
  self: globalThis,
  location: { href: "http://localhost/" },
  WorkerGlobalScope: Object,
  XMLHttpRequest: class {
    open(_, name) { this.name = name; }
    send() { this.response = contents(this.name); }
  },
  console: new console.Console(process.stderr),
});
delete globalThis.process;
vm.runInThisContext(contents("engine_bundle.js").toString());
const port = { postMessage: write };
globalThis.onmessage({ data: port });
setTimeout(() => port.onmessage({ data: requests })); // after the engine has begun
