"""The texts of the judge prompts: instructions and templates, from the papers where they print them."""

_CRITERION = (
    "IF the CONTEXT is sufficient to infer the ANSWER to the question and 0 IF the CONTEXT cannot be used to infer the "
    "ANSWER to the question. Make the sufficiency judgment based solely on the context, without relying on your memory to "
    "determine whether the question can be answered from the context."
)

_PROCEDURE = (
    "First, output a list of step-by-step questions that would be used to arrive at a label for the criteria. Make sure to "
    "include questions about assumptions implicit in the QUESTION. Include questions about any mathematical calculations or "
    "arithmetic that would be required.\n\n"
    "Next, answer each of the questions. Please note that you may answer these questions only on the basis of the given "
    "context; do not use your own outside knowledge. Make sure to work step by step through any required mathematical "
    "calculations or arithmetic."
)

_EXPERT = "You are an expert LLM evaluator that excels at evaluating a QUESTION, ANSWER and REFERENCES."

SUFFICIENCY_SYSTEM = (
    f"{_EXPERT} Consider the following criteria:\n\n"
    f"Sufficient Context To The Given Answer: 1 {_CRITERION}\n\n"
    f"{_PROCEDURE} Finally, use these answers to evaluate the criteria.\n\n"
    "EVALUATION (JSON)\n\n"
    "EXAMPLE:\n\n"
    "### QUESTION\n"
    "In which year did the publisher of Roald Dahl's Guide to Railway Safety cease to exist?\n\n"
    "### ANSWER\n"
    "2001\n\n"
    "### References\n"
    "Roald Dahl's Guide to Railway Safety was published in 1991 by the British Railways Board. The British Railways Board "
    "had asked Roald Dahl to write the text of the booklet, and Quentin Blake to illustrate it, to help young people enjoy "
    "using the railways safely. The British Railways Board (BRB) was a nationalised industry in the United Kingdom that "
    "operated from 1963 to 2001. Until 1997 it was responsible for most railway services in Great Britain, trading under "
    "the brand name British Railways and, from 1965, British Rail. It did not operate railways in Northern Ireland, where "
    "railways were the responsibility of the Government of Northern Ireland.\n\n"
    "### EXPLANATION\n"
    "The context mentions that Roald Dahl's Guide to Railway Safety was published by the British Railways Board. It also "
    "states that the British Railways Board operated from 1963 to 2001, meaning the year it ceased to exist was 2001. "
    "Therefore, the context does provide a precise answer to the question.\n\n"
    "### JSON\n"
    '{ "Sufficient Context To The Given Answer": 1 }\n\n'
    f"Remember the instructions: {_EXPERT} Consider the following criteria: Sufficient Context: 1 {_CRITERION}\n\n"
    f"{_PROCEDURE}\n\n"
    "Finally, use these answers to evaluate the criteria. Output the ### EXPLANATION (Text). Then, use the EXPLANATION to "
    "output the ### EVALUATION (JSON)"
)
"""TIRESRAG-R1, Figure 11; criteria and steps appear twice, as in the figure."""

THINKING_SYSTEM = (
    "You are an expert reasoning evaluator for Retrieval-Augmented Generation (RAG) tasks. Your goal is to judge the "
    "reasoning quality of the model's thinking process based on the retrieved context and question. You will assign a reward "
    "score between 0 and 1. This score reflects only the quality of the reasoning process, not whether the final answer is "
    "correct.\n\n"
    "Evaluation Criteria:\n\n"
    "1. Logical Soundness - Is the reasoning coherent and structured?\n"
    "2. Contextual Alignment - Does it use retrieved evidence correctly?\n"
    "3. Error Awareness - Does it avoid unsupported assumptions?\n"
    "4. Clarity and Precision - Is it concise, relevant, and non-redundant?\n\n"
    "Scoring:\n\n"
    "0.0: Completely flawed reasoning\n"
    "1.0: Perfect reasoning\n"
    "Intermediate (e.g., 0.3, 0.7) are allowed.\n\n"
    "Important:\n\n"
    "- Judge only the thinking process, not the answer.\n"
    "- Reward accurate, grounded, and structured reasoning.\n\n"
    "Your Output:\n\n"
    "A single float-type score from {0.0, 0.1, 0.2, ..., 1.0}.\n"
    "No explanation. Only the score."
)
"""TIRESRAG-R1, Figure 12."""

CORRECTNESS_TEMPLATE = (
    "Given a Question and its Golden Answer, verify whether the Predicted Answer is correct. The prediction is correct if it "
    "fully aligns with the meaning and key information of the Golden Answer. Respond with True if the prediction is correct "
    "and False otherwise.\n\n"
    "Question: {question}\n"
    "Golden Answer: {reference}\n"
    "Predicted Answer: {prediction}"
)
"""TIRESRAG-R1, Figure 13."""

VALIDATION_SYSTEM = (
    "You are an excellent teacher. You will be given a query and its corresponding label, along with a student's answer to "
    "validate. Your task is to determine if the answer correctly answers the query based on the label.\n"
    'Provide your validation in the form: Validation: ["Correct"] or Validation: ["Wrong"]. Learn from the instances below:\n'
    "### Instance 1\n"
    "#### User's input:\n"
    'Query: "What is the majority party in the country where Canberra is located in 2024?"\n'
    'Label: "The Labor Party."\n'
    'Student\'s Answer: "The Labor Party is the majority party in the country where Canberra is located in 2024."\n'
    "#### Expected response:\n"
    "Analysis:\n"
    "The student's answer correctly matches the label, as it accurately restates that the Labor Party is the majority party "
    "in the country where Canberra is located in 2024.\n"
    'Validation: ["Correct"]\n'
    "### Instance 2\n"
    "#### User's input:\n"
    'Query: "Are either Baz Warne or Marty Balin actors?"\n'
    'Label: "no"\n'
    'Student\'s Answer: "Baz Warne is an actor while Marty Balin is not."\n'
    "#### Expected response:\n"
    "Analysis:\n"
    "The label indicates that neither Baz Warne nor Marty Balin are actors. However, the student's answer incorrectly states "
    "that Baz Warne is an actor. This contradicts the label. Therefore, the student's answer does not match the correct "
    "information provided by the label.\n"
    'Validation: ["Wrong"]\n\n'
    "Now process the user query."
)
"""R2AG, Figure A.4."""

RELEVANCE_SYSTEM = (
    "You judge how relevant retrieved documents are to a question. A document is relevant if it states a fact that is needed "
    "on the way to the answer, even where it does not state the answer itself; one that only shares names or topic with the "
    "question is not.\n\n"
    "Give one score for the documents together, one of 0, 0.1, 0.2, ..., 1: 0 means that nothing in them helps, 1 that they "
    "state what is needed. Write the score alone."
)
"""In our own words: R3-RAG describes this instruction and its scores (Eq. 3, section 3.2.2), but does not print it."""

ERROR_ANALYSIS_TEMPLATE = (
    "A search agent was asked a question and answered it wrongly. You see what it thought and found.\n\n"
    "Question: {question}\nRight answer: {gold}\nIts answer: {predicted}\n\nWhat it thought and found:\n"
)

ERROR_ASPECTS = {
    "mistaken": "Did it take what it had found about something else for what the question asks about?",
    "faithful": "Does what it thought agree with what it had found, without anything that was not found?",
    "reached": "Did it arrive at the right answer in its thoughts?",
}
"""Questions in our own words that determine the error type of TIRESRAG-R1's Table 2; the authors classified by hand."""
