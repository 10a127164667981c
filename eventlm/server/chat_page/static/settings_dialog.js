// The dialog of settings. The names of its fields are those of the settings.

import { problemOfMoreParameters, resetSettings } from "./settings.js";

export class SettingsDialog {
  #dialog = document.getElementById("settings");
  #form = document.getElementById("settings-form");
  #settings;

  /** onSave takes the new settings. */
  constructor(onSave, onDeleteAll) {
    const more = this.#form.elements.moreParameters;
    more.addEventListener("input", () => more.setCustomValidity(problemOfMoreParameters(more.value)));
    // A field that is shown as wrong must be visible.
    more.addEventListener("invalid", () => {
      more.closest("details").open = true;
    });
    this.#form.addEventListener("submit", () => onSave({ ...this.#settings, ...this.#read() }));
    document.getElementById("close-settings").onclick = () => this.#dialog.close();
    document.getElementById("reset-settings").onclick = () => this.#fill(resetSettings(this.#read()));
    document.getElementById("delete-all").onclick = () => {
      this.#dialog.close();
      onDeleteAll();
    };
  }

  /** Show the settings, with the focus on a field. */
  open(settings, field = "systemPrompt") {
    this.#settings = settings;
    this.#fill(settings);
    this.#dialog.showModal();
    this.#form.elements[field].focus();
  }

  #fields() {
    return [...this.#form.elements].filter(({ name }) => name);
  }

  #fill(settings) {
    for (const field of this.#fields()) {
      if (field.type === "checkbox") field.checked = settings[field.name];
      else field.value = settings[field.name] ?? "";
      field.dispatchEvent(new Event("input"));
    }
    this.#form.querySelector("details").open = Boolean(settings.moreParameters);
  }

  #read() {
    return Object.fromEntries(this.#fields().map((field) => [field.name, valueOf(field)]));
  }
}

function valueOf(field) {
  if (field.type === "checkbox") return field.checked;
  if (field.type === "number") return field.value === "" ? null : Number(field.value);
  return field.name === "apiKey" ? field.value.trim() : field.value;
}
