output "bucket" {
  value = google_storage_bucket.checkpoints.url
}

output "template" {
  description = "For gcloud dataflow flex-template run --template-file-gcs-location."
  value       = "${google_storage_bucket.checkpoints.url}/${google_storage_bucket_object.template.name}"
}

output "service_account" {
  value = google_service_account.worker.email
}
