"use strict";
// Runs the site's search where it is opened from its folder: browsers start no workers from files. What is called
// iframe-worker elsewhere, for Material's offline plugin: the worker's script runs in a hidden frame.
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.documentElement.append(frame);
      this.inside = frame.contentWindow;
      this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.isReady = new Promise((done) => {
        const script = this.inside.document.createElement("script");
        script.src = url;
        script.onload = done;
        this.inside.document.body.append(script);
      });
    }
    postMessage(data) {
      this.isReady.then(() => this.inside.dispatchEvent(new this.inside.MessageEvent("message", { data })));
    }
  };
