// The admin token: kept for this tab only, and never part of an address.

const NAME = "vllm-gateway.token";

/** Return the token, or null. */
export const token = () => sessionStorage.getItem(NAME);

export const keepToken = (text) => sessionStorage.setItem(NAME, text);

export const forgetToken = () => sessionStorage.removeItem(NAME);
