// The page reads a picture in the browser and sends it with the search: no upload, no file on the server.
const limit = Number(element.querySelector("input").dataset.limit);
const take = (file) => {
  if (!file) return;
  const reader = new FileReader();
  reader.onload = () => { props.value = file.size > limit ? "too large" : String(reader.result).replace(/^data:[^,]*,/, "data:image/png;base64,"); trigger("change"); };
  reader.readAsDataURL(file);
};
element.addEventListener("change", (event) => { if (event.target.type === "file") take(event.target.files[0]); });
element.addEventListener("dragover", (event) => event.preventDefault());
element.addEventListener("drop", (event) => { event.preventDefault(); take(event.dataTransfer.files[0]); });
document.addEventListener("paste", (event) => { if (element.offsetParent) take(event.clipboardData.files[0]); });
