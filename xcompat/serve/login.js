"use strict";
// A visitor who comes by a link of another site has a cookie that the browser does not send with that visit.
fetch("/login").then((answer) => { if (answer.status === 204) location.replace(location.href); });
document.getElementById("login").addEventListener("submit", async (event) => {
  event.preventDefault();
  const body = JSON.stringify({ password: document.getElementById("password").value });
  const answer = await fetch("/login", { method: "POST", headers: { "Content-Type": "application/json" }, body });
  if (answer.ok) { location.replace(location.href); return; }
  const line = document.createElement("p");
  line.className = "alert";
  line.setAttribute("role", "alert");
  line.textContent = await answer.text();
  document.getElementById("said").replaceChildren(line);
});
