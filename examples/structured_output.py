"""Make the model answer in the form of a JSON schema: `python structured_output.py [MODEL]`."""

import json
import sys

from eventlm import LLM, SamplingParams, StructuredOutputsParams

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 3, "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "drinks": {"enum": ["tea", "coffee", "water"]},
    },
    "required": ["name", "age", "drinks"],
    "additionalProperties": False,
}

with LLM(sys.argv[1] if len(sys.argv) > 1 else "smollm2") as llm:
    params = SamplingParams(
        temperature=0,
        max_tokens=200,
        structured_outputs=StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True),
    )
    [output] = llm.chat([{"role": "user", "content": "Invent a person, as JSON."}], params)
    person = json.loads(output.outputs[0].text)
    print(f"{person['name']} is {person['age']} and drinks {person['drinks']}.")
